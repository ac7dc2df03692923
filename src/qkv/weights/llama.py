"""Llama's published names and settings, and Mistral's: a Llama that may look back only so far."""

from typing import Any

from qkv.choices import NormKind, PositionKind
from qkv.config import GPTConfig, RopeScaling
from qkv.errors import ConfigError
from qkv.weights.names import NameTable, Rename, layers, linear
from qkv.weights.settings import Settings, activation_word, written

SETTINGS = {
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
LINEAR = {"factor": "factor"}
LLAMA3 = {
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_context_length",
}
INERT = frozenset({"is_llama_config", "transformers.js_config"})


def read(given: Settings) -> GPTConfig:
    given.expect({"rope_interleaved": False})
    shape = {
        "norm_eps": 1e-6,
        "tie_embeddings": False,
        "attention_bias": False,
        "feed_forward_bias": False,
        **given.renamed(SETTINGS),
    }
    return GPTConfig(
        activation=given.activation("hidden_act", "silu"),
        gated=True,
        norm=NormKind.RMS,
        positions=PositionKind.ROTARY,
        dropout=given.take("attention_dropout", 0.0),
        **_rotary(given),
        **shape,
    )


def read_mistral(given: Settings) -> GPTConfig:
    window = 4096 if given.lacks("sliding_window") else given.take("sliding_window")  # null: no window
    return read(given) if window is None else read(given).replace(sliding_window=window)


def _rotary(given: Settings) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` stood apart before they became `rope_parameters`."""
    rope = {**given.take_table("rope_scaling"), **given.take_table("rope_parameters")}
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    base = rope.pop("rope_theta", given.take("rope_theta", 10000.0))
    known = {"default": {}, "linear": LINEAR, "llama3": {**LINEAR, **LLAMA3}}
    if not isinstance(kind, str) or kind not in known or rope.keys() != known[kind].keys():
        raise ConfigError(f"rotary positions of kind {kind!r} with {rope or 'nothing else'} are not supported")
    given.theirs |= {ours: theirs for theirs, ours in known[kind].items()}
    scaling = {ours: rope[theirs] for theirs, ours in known[kind].items()}
    return {"rope_theta": base, "rope_scaling": RopeScaling(**scaling) if scaling else None}


def _rope_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if scaling.original_context_length is None:
        return {"rope_type": "linear", **written(scaling, LINEAR)}
    return {"rope_type": "llama3", **written(scaling, {**LINEAR, **LLAMA3})}


def write(config: GPTConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": activation_word(config.activation),
        "attention_dropout": config.dropout,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_scaling(config.rope_scaling),
        **written(config, SETTINGS),
    }


def write_mistral(config: GPTConfig) -> dict[str, Any]:
    return {**write(config), "architectures": ["MistralForCausalLM"], "sliding_window": config.sliding_window}


def names(config: GPTConfig) -> NameTable:
    parts = {
        "input_layernorm": "attention_norm",
        "self_attn.q_proj": "attention.query",
        "self_attn.k_proj": "attention.key",
        "self_attn.v_proj": "attention.value",
        "self_attn.o_proj": "attention.output",
        "post_attention_layernorm": "feedforward_norm",
        "mlp.gate_proj": "feedforward.gate",
        "mlp.up_proj": "feedforward.expand",
        "mlp.down_proj": "feedforward.contract",
    }
    return NameTable(
        renames=[
            Rename("model.embed_tokens.weight", ("embedding.token.weight",)),
            *layers("model.layers.{}", "blocks.{}", n_layers=config.n_layers, parts=parts),
            *linear("model.norm", "final_norm"),
            Rename("lm_head.weight", ("unembedding.weight",)),
        ],
        prefix="model.",
        ignored=(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
    )
