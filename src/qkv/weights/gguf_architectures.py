"""Map the settings and tensor names of the supported GGUF architectures, Llama and GPT-2, to ours."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from qkv.choices import Activation, NormKind, PositionKind
from qkv.config import GPTConfig, ModelConfig, RopeScaling
from qkv.errors import ConfigError, WeightsError
from qkv.weights.name_table import NameMapping, NameTable, linear_mappings_per_layer, weight_and_bias_mappings

SIZE_SETTINGS = {
    "context_length": "context_length",
    "embedding_length": "d_model",
    "block_count": "n_layers",
    "feed_forward_length": "d_ff",
    "attention.head_count": "n_heads",
}


@dataclass(frozen=True, kw_only=True)
class GGUFArchitecture:
    """The functions that convert one GGUF architecture. Setting keys omit the prefix with the architecture's name."""

    read_config: Callable[[Mapping[str, Any], frozenset[str]], GPTConfig]
    write_config: Callable[[GPTConfig], dict[str, Any]]
    name_table: Callable[[GPTConfig], NameTable]
    has_interleaved_rotary: bool
    """Whether the rows of the query and key projections are in the interleaved rotary layout."""


def find_lossless_gguf_architecture(config: ModelConfig) -> str:
    """Return the name of the GGUF architecture that can represent a config. Raise an error if there is none."""
    if not isinstance(config, GPTConfig):
        raise WeightsError(f"only models of the gpt family can be saved as GGUF, got {config.family}")
    name = "llama" if config.positions is PositionKind.ROTARY else "gpt2"
    architecture = GGUF_ARCHITECTURES[name]
    tensors = frozenset(mapping.published for mapping in architecture.name_table(config).mappings)
    if config.tie_embeddings:
        tensors -= {"output.weight"}
    if not config.attention_bias:
        tensors = frozenset(tensor for tensor in tensors if "attn" not in tensor or not tensor.endswith(".bias"))
    if not config.feed_forward_bias:
        tensors = frozenset(tensor for tensor in tensors if "ffn" not in tensor or not tensor.endswith(".bias"))
    restored = architecture.read_config({"vocab_size": config.vocab_size, **architecture.write_config(config)}, tensors)
    # GGUF files do not store settings that only affect training.
    expected = config.replace(dropout=restored.dropout, init_std=restored.init_std)
    lost = [
        f"{field}={getattr(config, field)}"
        for field in type(config).model_fields
        if getattr(expected, field) != getattr(restored, field)
    ]
    if lost:
        raise ConfigError(f"the GGUF architecture {name} does not support {', '.join(lost)}")
    return name


def _read_gguf_llama_config(settings: Mapping[str, Any], tensors: frozenset[str]) -> GPTConfig:
    sizes = _read_sizes(settings)
    d_head = settings.get("attention.key_length", sizes["d_model"] // max(1, sizes["n_heads"]))
    n_rotated = settings.get("rope.dimension_count", d_head)
    if n_rotated != d_head:
        raise ConfigError(f"rope.dimension_count must equal d_head={d_head}, got {n_rotated}")
    if "rope_freqs.weight" in tensors:
        raise ConfigError("rope_freqs.weight: individually scaled rotary frequencies are not supported")
    return GPTConfig(
        **sizes,
        n_kv_heads=settings.get("attention.head_count_kv", sizes["n_heads"]),
        d_head=d_head,
        norm_eps=_shortest_decimal(settings["attention.layer_norm_rms_epsilon"]),
        rope_theta=_shortest_decimal(settings.get("rope.freq_base", 10000.0)),
        rope_scaling=_read_linear_rope_scaling(settings),
        activation=Activation.SILU,
        gated=True,
        norm=NormKind.RMS,
        positions=PositionKind.ROTARY,
        attention_bias="blk.0.attn_q.bias" in tensors,
        feed_forward_bias="blk.0.ffn_up.bias" in tensors,
        tie_embeddings="output.weight" not in tensors,
    )


def _read_linear_rope_scaling(settings: Mapping[str, Any]) -> RopeScaling | None:
    match settings.get("rope.scaling.type", "none"):
        case "none":
            return None
        case "linear":
            return RopeScaling(factor=_shortest_decimal(settings["rope.scaling.factor"]))
        case other:
            raise ConfigError(f"rope.scaling.type={other!r} is not supported; the only supported value is 'linear'")


def _gguf_llama_settings(config: GPTConfig) -> dict[str, Any]:
    settings = {
        **{key: getattr(config, field) for key, field in SIZE_SETTINGS.items()},
        "vocab_size": config.vocab_size,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.key_length": config.d_head,
        "attention.value_length": config.d_value,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.dimension_count": config.d_head,
        "rope.freq_base": config.rope_theta,
    }
    if config.rope_scaling is not None:
        settings |= {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope_scaling.factor}
    return settings


def _gguf_llama_names(config: GPTConfig) -> NameTable:
    parts = {
        "attn_norm": "attention_norm",
        "attn_q": "attention.q_proj",
        "attn_k": "attention.k_proj",
        "attn_v": "attention.v_proj",
        "attn_output": "attention.out_proj",
        "ffn_norm": "feed_forward_norm",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    }
    return NameTable(
        mappings=[
            *_mappings_outside_blocks(),
            *linear_mappings_per_layer("blk.{}", "blocks.{}", n_layers=config.n_layers, parts=parts),
        ]
    )


def _read_gguf_gpt2_config(settings: Mapping[str, Any], tensors: frozenset[str]) -> GPTConfig:
    return GPTConfig(
        **_read_sizes(settings),
        norm_eps=_shortest_decimal(settings["attention.layer_norm_epsilon"]),
        tie_embeddings="output.weight" not in tensors,
    )


def _gguf_gpt2_settings(config: GPTConfig) -> dict[str, Any]:
    settings = {key: getattr(config, field) for key, field in SIZE_SETTINGS.items()}
    return {**settings, "vocab_size": config.vocab_size, "attention.layer_norm_epsilon": config.norm_eps}


def _gguf_gpt2_names(config: GPTConfig) -> NameTable:
    parts = {
        "attn_norm": "attention_norm",
        "attn_output": "attention.out_proj",
        "ffn_norm": "feed_forward_norm",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    }
    qkv_mappings = [
        NameMapping(
            f"blk.{i}.attn_qkv.{kind}",
            tuple(f"blocks.{i}.attention.{part}.{kind}" for part in ("q_proj", "k_proj", "v_proj")),
        )
        for i in range(config.n_layers)
        for kind in ("weight", "bias")
    ]
    position_mapping = NameMapping("position_embd.weight", ("embedding.position.table.weight",))
    return NameTable(
        mappings=[
            *_mappings_outside_blocks(),
            position_mapping,
            *qkv_mappings,
            *linear_mappings_per_layer("blk.{}", "blocks.{}", n_layers=config.n_layers, parts=parts),
        ]
    )


def _mappings_outside_blocks() -> list[NameMapping]:
    return [
        NameMapping("token_embd.weight", ("embedding.token.weight",)),
        *weight_and_bias_mappings("output_norm", "final_norm"),
        NameMapping("output.weight", ("unembedding.weight",)),
    ]


def _read_sizes(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"vocab_size": settings["vocab_size"], **{field: settings[key] for key, field in SIZE_SETTINGS.items()}}


def _shortest_decimal(value: float) -> float:
    """Return the shortest decimal number with the same float32 value: 1e-05 instead of 9.999999747378752e-06."""
    return float(str(np.float32(value)))


GGUF_ARCHITECTURES = {
    "llama": GGUFArchitecture(
        read_config=_read_gguf_llama_config,
        write_config=_gguf_llama_settings,
        name_table=_gguf_llama_names,
        has_interleaved_rotary=True,
    ),
    "gpt2": GGUFArchitecture(
        read_config=_read_gguf_gpt2_config,
        write_config=_gguf_gpt2_settings,
        name_table=_gguf_gpt2_names,
        has_interleaved_rotary=False,
    ),
}
