"""BART's published names and settings; Marian borrows most of them."""

from typing import Any

from qkv.choices import PositionKind
from qkv.config import Seq2SeqConfig
from qkv.weights.names import NameTable, Rename, Turn, layers, linear
from qkv.weights.settings import Settings, activation_word, written

SETTINGS = {
    "max_position_embeddings": "context_length",
    "d_model": "d_model",
    "encoder_layers": "n_encoder_layers",
    "decoder_layers": "n_decoder_layers",
    "scale_embedding": "scale_embedding",
    "tie_word_embeddings": "tie_embeddings",
    "dropout": "dropout",
    "init_std": "init_std",
}
# What conversions from older code carry along; nothing reads it. num_hidden_layers is a copy of encoder_layers.
INERT = frozenset({"add_bias_logits", "extra_pos_embeddings", "save_step", "num_hidden_layers"})
BIAS = "final_logits_bias"
"""Files of a bare backbone leave it out; it is zero there."""


def read(given: Settings) -> Seq2SeqConfig:
    given.expect({"normalize_embedding": True, "static_position_embeddings": False})
    return Seq2SeqConfig(
        vocab_size=given.need("vocab_size"),
        positions=PositionKind.LEARNED,
        position_offset=2,
        embedding_norm=True,
        **shared_settings(given),
    )


def write(config: Seq2SeqConfig) -> dict[str, Any]:
    return {
        "architectures": ["BartForConditionalGeneration"],
        "vocab_size": config.vocab_size,
        **shared_written(config),
    }


def names(config: Seq2SeqConfig) -> NameTable:
    return NameTable(
        renames=[
            *shared_names(config),
            *(
                rename
                for side in ("encoder", "decoder")
                for rename in (
                    Rename(f"model.{side}.embed_positions.weight", (f"{side}.embedding.position.table.weight",)),
                    *linear(f"model.{side}.layernorm_embedding", f"{side}.embedding.norm"),
                )
            ),
        ],
        prefix="model.",
        ignored=(r"(encoder|decoder)\.version",),
    )


def shared_settings(given: Settings) -> dict[str, Any]:
    given.expect({"normalize_before": False, "add_final_layer_norm": False, "is_encoder_decoder": True})
    return {
        **given.both("encoder_attention_heads", "decoder_attention_heads", ours="n_heads"),
        **given.both("encoder_ffn_dim", "decoder_ffn_dim", ours="d_ff"),
        "activation": given.activation("activation_function", "gelu"),
        "unembedding_bias": not given.tensor_names or BIAS in given.tensor_names,
        "scale_embedding": False,
        **given.renamed(SETTINGS),
    }


def shared_written(config: Seq2SeqConfig) -> dict[str, Any]:
    return {
        "is_encoder_decoder": True,
        "encoder_attention_heads": config.n_heads,
        "decoder_attention_heads": config.n_heads,
        "encoder_ffn_dim": config.d_ff,
        "decoder_ffn_dim": config.d_ff,
        "activation_function": activation_word(config.activation),
        **written(config, SETTINGS),
    }


def shared_names(config: Seq2SeqConfig) -> list[Rename]:
    own = {
        "self_attn.q_proj": "attention.query",
        "self_attn.k_proj": "attention.key",
        "self_attn.v_proj": "attention.value",
        "self_attn.out_proj": "attention.output",
        "self_attn_layer_norm": "attention_norm",
        "fc1": "feedforward.expand",
        "fc2": "feedforward.contract",
        "final_layer_norm": "feedforward_norm",
    }
    cross = {
        "encoder_attn.q_proj": "cross.query",
        "encoder_attn.k_proj": "cross.key",
        "encoder_attn.v_proj": "cross.value",
        "encoder_attn.out_proj": "cross.output",
        "encoder_attn_layer_norm": "cross_norm",
    }
    shared = [Rename("model.shared.weight", ("decoder.embedding.token.weight",))]
    return [
        *(shared if config.share_embeddings else []),
        Rename("model.encoder.embed_tokens.weight", ("encoder.embedding.token.weight",)),
        Rename("model.decoder.embed_tokens.weight", ("decoder.embedding.token.weight",)),
        *layers("model.encoder.layers.{}", "encoder.blocks.{}", n_layers=config.n_encoder_layers, parts=own),
        *layers(
            "model.decoder.layers.{}",
            "decoder.blocks.{}",
            n_layers=config.n_decoder_layers,
            parts={**own, **cross},
        ),
        Rename("lm_head.weight", ("unembedding.weight",)),
        *([Rename(BIAS, ("unembedding.bias",), Turn.ONE_ROW)] if config.unembedding_bias else []),
    ]
