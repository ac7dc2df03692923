"""Map the published config and tensor names of Llama and Mistral to ours. Mistral is Llama with a sliding window."""

from typing import Any

from qkv.choices import NormKind, PositionKind
from qkv.config import GPTConfig, RopeScaling
from qkv.errors import ConfigError
from qkv.weights.name_table import NameMapping, NameTable, linear_mappings_per_layer, weight_and_bias_mappings
from qkv.weights.published_config import PublishedConfig, activation_name, to_published_settings

LLAMA_SETTINGS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "d_head",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "attention_bias": "attention_bias",
    "mlp_bias": "feed_forward_bias",
    "initializer_range": "init_std",
}
LINEAR_ROPE_SETTINGS = {"factor": "factor"}
LLAMA3_ROPE_SETTINGS = {
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_context_length",
}
LLAMA_IGNORED_KEYS = frozenset({"is_llama_config", "transformers.js_config"})


def read_llama_config(published: PublishedConfig) -> GPTConfig:
    published.pop_expected_values({"rope_interleaved": False})
    settings = {
        "norm_eps": 1e-6,
        "tie_embeddings": False,
        "attention_bias": False,
        "feed_forward_bias": False,
        **published.pop_renamed(LLAMA_SETTINGS),
    }
    return GPTConfig(
        activation=published.pop_activation("hidden_act", "silu"),
        gated=True,
        norm=NormKind.RMS,
        positions=PositionKind.ROTARY,
        dropout=published.pop("attention_dropout", 0.0),
        **_read_rotary_settings(published),
        **settings,
    )


def read_mistral_config(published: PublishedConfig) -> GPTConfig:
    window = 4096 if published.is_absent("sliding_window") else published.pop("sliding_window")  # null means no window
    return (
        read_llama_config(published) if window is None else read_llama_config(published).replace(sliding_window=window)
    )


def _read_rotary_settings(published: PublishedConfig) -> dict[str, Any]:
    """Remove the rotary settings from a published config, and return them as settings for our config.

    Older configs contain `rope_theta` and `rope_scaling`. Newer configs contain `rope_parameters`.
    """
    rope = {**published.pop_dict("rope_scaling"), **published.pop_dict("rope_parameters")}
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    theta = rope.pop("rope_theta", published.pop("rope_theta", 10000.0))
    supported = {
        "default": {},
        "linear": LINEAR_ROPE_SETTINGS,
        "llama3": {**LINEAR_ROPE_SETTINGS, **LLAMA3_ROPE_SETTINGS},
    }
    if not isinstance(kind, str) or kind not in supported or rope.keys() != supported[kind].keys():
        raise ConfigError(f"rope_type={kind!r} with the settings {rope} is not supported")
    published.published_names |= {field: key for key, field in supported[kind].items()}
    scaling = {field: rope[key] for key, field in supported[kind].items()}
    return {"rope_theta": theta, "rope_scaling": RopeScaling(**scaling) if scaling else None}


def _to_hf_rope_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if scaling.original_context_length is None:
        return {"rope_type": "linear", **to_published_settings(scaling, LINEAR_ROPE_SETTINGS)}
    return {"rope_type": "llama3", **to_published_settings(scaling, {**LINEAR_ROPE_SETTINGS, **LLAMA3_ROPE_SETTINGS})}


def to_hf_llama_config(config: GPTConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": activation_name(config.activation),
        "attention_dropout": config.dropout,
        "rope_theta": config.rope_theta,
        "rope_scaling": _to_hf_rope_scaling(config.rope_scaling),
        **to_published_settings(config, LLAMA_SETTINGS),
    }


def to_hf_mistral_config(config: GPTConfig) -> dict[str, Any]:
    return {
        **to_hf_llama_config(config),
        "architectures": ["MistralForCausalLM"],
        "sliding_window": config.sliding_window,
    }


def llama_name_table(config: GPTConfig) -> NameTable:
    parts = {
        "input_layernorm": "attention_norm",
        "self_attn.q_proj": "attention.q_proj",
        "self_attn.k_proj": "attention.k_proj",
        "self_attn.v_proj": "attention.v_proj",
        "self_attn.o_proj": "attention.out_proj",
        "post_attention_layernorm": "feed_forward_norm",
        "mlp.gate_proj": "feed_forward.gate_proj",
        "mlp.up_proj": "feed_forward.up_proj",
        "mlp.down_proj": "feed_forward.down_proj",
    }
    return NameTable(
        mappings=[
            NameMapping("model.embed_tokens.weight", ("embedding.token.weight",)),
            *linear_mappings_per_layer("model.layers.{}", "blocks.{}", n_layers=config.n_layers, parts=parts),
            *weight_and_bias_mappings("model.norm", "final_norm"),
            NameMapping("lm_head.weight", ("unembedding.weight",)),
        ],
        prefix="model.",
        ignored_patterns=(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
    )
