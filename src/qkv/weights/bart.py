"""Map BART's published config and tensor names to ours. Marian shares most of them."""

from typing import Any

from qkv.choices import PositionKind
from qkv.config import Seq2SeqConfig
from qkv.weights.name_table import Layout, NameMapping, NameTable, linear_mappings_per_layer, weight_and_bias_mappings
from qkv.weights.published_config import PublishedConfig, activation_name, to_published_settings

BART_SETTINGS = {
    "max_position_embeddings": "context_length",
    "d_model": "d_model",
    "encoder_layers": "n_encoder_layers",
    "decoder_layers": "n_decoder_layers",
    "scale_embedding": "scale_embedding",
    "tie_word_embeddings": "tie_embeddings",
    "dropout": "dropout",
    "init_std": "init_std",
}
# Older conversions contain these unused settings. num_hidden_layers duplicates encoder_layers.
BART_IGNORED_KEYS = frozenset({"add_bias_logits", "extra_pos_embeddings", "save_step", "num_hidden_layers"})
LOGIT_BIAS = "final_logits_bias"
"""The name of the logit bias tensor. Files that contain only the backbone omit this bias, which is then zero."""


def read_bart_config(published: PublishedConfig) -> Seq2SeqConfig:
    published.pop_expected_values({"normalize_embedding": True, "static_position_embeddings": False})
    return Seq2SeqConfig(
        vocab_size=published.pop_required("vocab_size"),
        positions=PositionKind.LEARNED,
        position_offset=2,
        embedding_norm=True,
        **pop_bart_marian_settings(published),
    )


def to_hf_bart_config(config: Seq2SeqConfig) -> dict[str, Any]:
    return {
        "architectures": ["BartForConditionalGeneration"],
        "vocab_size": config.vocab_size,
        **to_hf_bart_marian_settings(config),
    }


def bart_name_table(config: Seq2SeqConfig) -> NameTable:
    return NameTable(
        mappings=[
            *bart_and_marian_mappings(config),
            *(
                mapping
                for side in ("encoder", "decoder")
                for mapping in (
                    NameMapping(f"model.{side}.embed_positions.weight", (f"{side}.embedding.position.table.weight",)),
                    *weight_and_bias_mappings(f"model.{side}.layernorm_embedding", f"{side}.embedding.norm"),
                )
            ),
        ],
        prefix="model.",
        ignored_patterns=(r"(encoder|decoder)\.version",),
    )


def pop_bart_marian_settings(published: PublishedConfig) -> dict[str, Any]:
    """Remove the settings that BART and Marian share from `published`, and return them as settings for our config."""
    published.pop_expected_values(
        {"normalize_before": False, "add_final_layer_norm": False, "is_encoder_decoder": True}
    )
    return {
        **published.pop_equal_pair("encoder_attention_heads", "decoder_attention_heads", field="n_heads"),
        **published.pop_equal_pair("encoder_ffn_dim", "decoder_ffn_dim", field="d_ff"),
        "activation": published.pop_activation("activation_function", "gelu"),
        "unembedding_bias": not published.tensor_names or LOGIT_BIAS in published.tensor_names,
        "scale_embedding": False,
        **published.pop_renamed(BART_SETTINGS),
    }


def to_hf_bart_marian_settings(config: Seq2SeqConfig) -> dict[str, Any]:
    """Return the settings that BART and Marian share, in Hugging Face's format."""
    return {
        "is_encoder_decoder": True,
        "encoder_attention_heads": config.n_heads,
        "decoder_attention_heads": config.n_heads,
        "encoder_ffn_dim": config.d_ff,
        "decoder_ffn_dim": config.d_ff,
        "activation_function": activation_name(config.activation),
        **to_published_settings(config, BART_SETTINGS),
    }


def bart_and_marian_mappings(config: Seq2SeqConfig) -> list[NameMapping]:
    """Return the name mappings for the tensors that BART and Marian share."""
    self_attention = {
        "self_attn.q_proj": "attention.q_proj",
        "self_attn.k_proj": "attention.k_proj",
        "self_attn.v_proj": "attention.v_proj",
        "self_attn.out_proj": "attention.out_proj",
        "self_attn_layer_norm": "attention_norm",
        "fc1": "feed_forward.up_proj",
        "fc2": "feed_forward.down_proj",
        "final_layer_norm": "feed_forward_norm",
    }
    cross_attention = {
        "encoder_attn.q_proj": "cross_attention.q_proj",
        "encoder_attn.k_proj": "cross_attention.k_proj",
        "encoder_attn.v_proj": "cross_attention.v_proj",
        "encoder_attn.out_proj": "cross_attention.out_proj",
        "encoder_attn_layer_norm": "cross_attention_norm",
    }
    shared_embedding = [NameMapping("model.shared.weight", ("decoder.embedding.token.weight",))]
    return [
        *(shared_embedding if config.share_embeddings else []),
        NameMapping("model.encoder.embed_tokens.weight", ("encoder.embedding.token.weight",)),
        NameMapping("model.decoder.embed_tokens.weight", ("decoder.embedding.token.weight",)),
        *linear_mappings_per_layer(
            "model.encoder.layers.{}", "encoder.blocks.{}", n_layers=config.n_encoder_layers, parts=self_attention
        ),
        *linear_mappings_per_layer(
            "model.decoder.layers.{}",
            "decoder.blocks.{}",
            n_layers=config.n_decoder_layers,
            parts={**self_attention, **cross_attention},
        ),
        NameMapping("lm_head.weight", ("unembedding.weight",)),
        *([NameMapping(LOGIT_BIAS, ("unembedding.bias",), Layout.SINGLE_ROW)] if config.unembedding_bias else []),
    ]
