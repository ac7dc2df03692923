"""Map the published config and tensor names of T5 to ours.

Both version 1.0 (ReLU, tied embeddings) and version 1.1 (gated GELU, untied embeddings) are supported.
"""

from typing import Any

from qkv.choices import Activation, NormKind, NormPosition, PositionKind
from qkv.config import Seq2SeqConfig
from qkv.weights.name_table import NameMapping, NameTable, linear_mappings_per_layer, weight_and_bias_mappings
from qkv.weights.published_config import PublishedConfig, activation_name, parse_activation, to_published_settings

T5_SETTINGS = {
    "vocab_size": "vocab_size",
    "n_positions": "context_length",
    "d_model": "d_model",
    "d_kv": "d_head",
    "d_ff": "d_ff",
    "num_heads": "n_heads",
    "num_layers": "n_encoder_layers",
    "relative_attention_num_buckets": "relative_buckets",
    "relative_attention_max_distance": "relative_max_distance",
    "layer_norm_epsilon": "norm_eps",
    "dropout_rate": "dropout",
}


def read_t5_config(published: PublishedConfig) -> Seq2SeqConfig:
    settings = {"context_length": 512, "norm_eps": 1e-6, **published.pop_renamed(T5_SETTINGS)}
    activation, gated = _read_activation_and_gating(published)
    tied, scaled = _read_tied_embeddings_and_scaled_logits(published)
    return Seq2SeqConfig(
        n_decoder_layers=published.pop("num_decoder_layers", settings.get("n_encoder_layers")),
        activation=activation,
        gated=gated,
        tie_embeddings=tied,
        scale_logits=scaled,
        positions=PositionKind.RELATIVE,
        norm=NormKind.RMS,
        norm_position=NormPosition.PRE,
        final_norm=True,
        attention_bias=False,
        feed_forward_bias=False,
        scale_scores=False,
        scale_embedding=False,
        **settings,
    )


def _read_activation_and_gating(published: PublishedConfig) -> tuple[Activation, bool]:
    """Return the activation and whether the feed-forward layers are gated.

    In T5, `gated-gelu` refers to the tanh approximation, whereas `gelu` is exact.
    """
    value = str(published.pop("feed_forward_proj", "relu"))
    name = "gelu_new" if value == "gated-gelu" else value.removeprefix("gated-")
    gated = value.startswith("gated-")
    published.pop_expected_values({"dense_act_fn": name, "is_gated_act": gated})
    return parse_activation("feed_forward_proj", name), gated


def _read_tied_embeddings_and_scaled_logits(published: PublishedConfig) -> tuple[bool, bool]:
    """Return whether the embeddings are tied and whether the logits are scaled.

    In older files, `tie_word_embeddings` determines both. Newer files contain `scale_decoder_outputs`, and their
    `tie_word_embeddings` is always true, so only the tensor names indicate whether there is a separate unembedding.
    """
    tied = published.pop("tie_word_embeddings", True)
    scaled = published.pop("scale_decoder_outputs", tied)
    if not scaled and "lm_head.weight" in published.tensor_names:
        tied = False
    return tied, scaled


def to_hf_t5_config(config: Seq2SeqConfig) -> dict[str, Any]:
    name = activation_name(config.activation)
    if config.gated:
        name = "gated-gelu" if config.activation is Activation.GELU_TANH else f"gated-{name}"
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "is_encoder_decoder": True,
        "feed_forward_proj": name,
        "num_decoder_layers": config.n_decoder_layers,
        "tie_word_embeddings": config.tie_embeddings,
        **to_published_settings(config, T5_SETTINGS),
    }


def t5_name_table(config: Seq2SeqConfig) -> NameTable:
    self_attention = _attention_and_norm_names("layer.0", "SelfAttention", "attention")
    cross_attention = _attention_and_norm_names("layer.1", "EncDecAttention", "cross_attention")
    sides = (
        (
            "encoder",
            config.n_encoder_layers,
            {**self_attention, **_feed_forward_and_norm_names("layer.1", gated=config.gated)},
        ),
        (
            "decoder",
            config.n_decoder_layers,
            {**self_attention, **cross_attention, **_feed_forward_and_norm_names("layer.2", gated=config.gated)},
        ),
    )
    mappings = [NameMapping("shared.weight", ("decoder.embedding.token.weight",))]
    for side, n_layers, parts in sides:
        mappings += [
            NameMapping(f"{side}.embed_tokens.weight", (f"{side}.embedding.token.weight",)),
            # The encoder and decoder each have one table, which published files store in the first layer.
            NameMapping(
                f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
                (f"{side}.relative_positions.table.weight",),
            ),
            *linear_mappings_per_layer(side + ".block.{}", side + ".blocks.{}", n_layers=n_layers, parts=parts),
            *weight_and_bias_mappings(f"{side}.final_layer_norm", f"{side}.final_norm"),
        ]
    return NameTable(
        mappings=[*mappings, NameMapping("lm_head.weight", ("unembedding.weight",))],
        # An early conversion contains an unused table in the decoder's first cross-attention layer.
        ignored_patterns=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    )


def _attention_and_norm_names(layer: str, name: str, module: str) -> dict[str, str]:
    parts = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
    return {
        **{f"{layer}.{name}.{published}": f"{module}.{part}" for published, part in parts.items()},
        f"{layer}.layer_norm": f"{module}_norm",
    }


def _feed_forward_and_norm_names(layer: str, *, gated: bool) -> dict[str, str]:
    return {
        f"{layer}.DenseReluDense.{'wi_1' if gated else 'wi'}": "feed_forward.up_proj",
        f"{layer}.DenseReluDense.wi_0": "feed_forward.gate_proj",
        f"{layer}.DenseReluDense.wo": "feed_forward.down_proj",
        f"{layer}.layer_norm": "feed_forward_norm",
    }
