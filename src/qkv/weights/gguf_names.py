"""GGUF's names and settings of a Llama and a GPT-2, and ours."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from qkv.choices import Activation, NormKind, PositionKind
from qkv.config import GPTConfig, ModelConfig, RopeScaling
from qkv.errors import ConfigError, WeightsError
from qkv.weights.names import NameTable, Rename, layers, linear

SIZES = {
    "context_length": "context_length",
    "embedding_length": "d_model",
    "block_count": "n_layers",
    "feed_forward_length": "d_ff",
    "attention.head_count": "n_heads",
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How one `general.architecture` is read and written; keys come without the architecture's name before them."""

    read: Callable[[Mapping[str, Any], frozenset[str]], GPTConfig]
    write: Callable[[GPTConfig], dict[str, Any]]
    names: Callable[[GPTConfig], NameTable]
    in_pairs: bool
    """Query and key rows lie in the order of rotary pairs."""


def architecture_of(config: ModelConfig) -> str:
    """The architecture whose file says everything that this config says; refused where none does."""
    if not isinstance(config, GPTConfig):
        raise WeightsError(f"a {config.family} cannot be written as GGUF; a gpt can")
    name = "llama" if config.positions is PositionKind.ROTARY else "gpt2"
    known = ARCHITECTURES[name]
    tensors = frozenset(rename.theirs for rename in known.names(config).renames)
    if config.tie_embeddings:
        tensors -= {"output.weight"}
    if not config.attention_bias:
        tensors = frozenset(tensor for tensor in tensors if "attn" not in tensor or not tensor.endswith(".bias"))
    if not config.feed_forward_bias:
        tensors = frozenset(tensor for tensor in tensors if "ffn" not in tensor or not tensor.endswith(".bias"))
    back = known.read({"vocab_size": config.vocab_size, **known.write(config)}, tensors)
    # What only training knows is no part of a GGUF.
    same = config.replace(dropout=back.dropout, init_std=back.init_std)
    lost = [
        f"{field}={getattr(config, field)}"
        for field in type(config).model_fields
        if getattr(same, field) != getattr(back, field)
    ]
    if lost:
        raise ConfigError(f"a GGUF of architecture {name} cannot have {', '.join(lost)}")
    return name


def _read_llama(given: Mapping[str, Any], tensors: frozenset[str]) -> GPTConfig:
    sizes = _sizes(given)
    d_head = given.get("attention.key_length", sizes["d_model"] // max(1, sizes["n_heads"]))
    turned = given.get("rope.dimension_count", d_head)
    if turned != d_head:
        raise ConfigError(f"rotary positions of {turned} of {d_head} numbers a head are not supported")
    if "rope_freqs.weight" in tensors:
        raise ConfigError("rope_freqs.weight: rotary angles that were scaled one by one are not supported")
    return GPTConfig(
        **sizes,
        n_kv_heads=given.get("attention.head_count_kv", sizes["n_heads"]),
        d_head=d_head,
        norm_eps=_short(given["attention.layer_norm_rms_epsilon"]),
        rope_theta=_short(given.get("rope.freq_base", 10000.0)),
        rope_scaling=_read_scaling(given),
        activation=Activation.SILU,
        gated=True,
        norm=NormKind.RMS,
        positions=PositionKind.ROTARY,
        attention_bias="blk.0.attn_q.bias" in tensors,
        feed_forward_bias="blk.0.ffn_up.bias" in tensors,
        tie_embeddings="output.weight" not in tensors,
    )


def _read_scaling(given: Mapping[str, Any]) -> RopeScaling | None:
    match given.get("rope.scaling.type", "none"):
        case "none":
            return None
        case "linear":
            return RopeScaling(factor=_short(given["rope.scaling.factor"]))
        case other:
            raise ConfigError(f"rope.scaling.type={other!r} is not supported; linear is")


def _write_llama(config: GPTConfig) -> dict[str, Any]:
    settings = {
        **{key: getattr(config, field) for key, field in SIZES.items()},
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


def _llama_names(config: GPTConfig) -> NameTable:
    parts = {
        "attn_norm": "attention_norm",
        "attn_q": "attention.query",
        "attn_k": "attention.key",
        "attn_v": "attention.value",
        "attn_output": "attention.output",
        "ffn_norm": "feedforward_norm",
        "ffn_gate": "feedforward.gate",
        "ffn_up": "feedforward.expand",
        "ffn_down": "feedforward.contract",
    }
    return NameTable(renames=[*_around(), *layers("blk.{}", "blocks.{}", n_layers=config.n_layers, parts=parts)])


def _read_gpt2(given: Mapping[str, Any], tensors: frozenset[str]) -> GPTConfig:
    return GPTConfig(
        **_sizes(given),
        norm_eps=_short(given["attention.layer_norm_epsilon"]),
        tie_embeddings="output.weight" not in tensors,
    )


def _write_gpt2(config: GPTConfig) -> dict[str, Any]:
    settings = {key: getattr(config, field) for key, field in SIZES.items()}
    return {**settings, "vocab_size": config.vocab_size, "attention.layer_norm_epsilon": config.norm_eps}


def _gpt2_names(config: GPTConfig) -> NameTable:
    parts = {
        "attn_norm": "attention_norm",
        "attn_output": "attention.output",
        "ffn_norm": "feedforward_norm",
        "ffn_up": "feedforward.expand",
        "ffn_down": "feedforward.contract",
    }
    fused = [
        Rename(
            f"blk.{i}.attn_qkv.{kind}",
            tuple(f"blocks.{i}.attention.{part}.{kind}" for part in ("query", "key", "value")),
        )
        for i in range(config.n_layers)
        for kind in ("weight", "bias")
    ]
    positions = Rename("position_embd.weight", ("embedding.position.table.weight",))
    return NameTable(
        renames=[*_around(), positions, *fused, *layers("blk.{}", "blocks.{}", n_layers=config.n_layers, parts=parts)]
    )


def _around() -> list[Rename]:
    return [
        Rename("token_embd.weight", ("embedding.token.weight",)),
        *linear("output_norm", "final_norm"),
        Rename("output.weight", ("unembedding.weight",)),
    ]


def _sizes(given: Mapping[str, Any]) -> dict[str, Any]:
    return {"vocab_size": given["vocab_size"], **{field: given[key] for key, field in SIZES.items()}}


def _short(number: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(number)))


ARCHITECTURES = {
    "llama": Architecture(read=_read_llama, write=_write_llama, names=_llama_names, in_pairs=True),
    "gpt2": Architecture(read=_read_gpt2, write=_write_gpt2, names=_gpt2_names, in_pairs=False),
}
