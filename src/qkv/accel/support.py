"""Conditions that decide whether a fast path supports a model, shared by all backends."""

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor, nn

from qkv.choices import AttentionKernel, HeadCombination
from qkv.models import BERT, GPT, RNNSeq2Seq, Seq2Seq
from qkv.models.bert import MaskedLMHead
from qkv.models.stack import Stack
from qkv.nn import Attention, Block, Blocks, FeedForward, Tap, TokenEmbedding, Unembedding
from qkv.nn.embedding import InputEmbedding, PatchProjection
from qkv.nn.norm import LayerNorm, RMSNorm
from qkv.nn.positions import (
    ALiBi,
    ConcatenatedSinusoidalPositions,
    LearnedPositions,
    RelativeBias,
    RotaryEmbedding,
    SinusoidalPositions,
)

KNOWN_MODULES = frozenset(
    {
        *(GPT, BERT, MaskedLMHead, Seq2Seq, RNNSeq2Seq, Stack),
        *(Blocks, Block, Attention, FeedForward, LayerNorm, RMSNorm, Tap),
        *(InputEmbedding, TokenEmbedding, PatchProjection, Unembedding),
        *(LearnedPositions, SinusoidalPositions, ConcatenatedSinusoidalPositions, RotaryEmbedding, ALiBi, RelativeBias),
    }
)
"""Modules whose `forward` the engines reimplement. The engines reject all others, for example a new kind of norm."""


def has_hooks_or_is_active_tap(module: nn.Module) -> bool:
    """Return whether the module has a forward hook or is a tap in use.

    Fast paths skip the module's `forward` method, so they must not be used if this function returns True.
    """
    if isinstance(module, Tap):
        return bool(module.interventions or module.observers or module.optional_observers)
    return bool(module._forward_hooks or module._forward_pre_hooks)  # noqa: SLF001 - torch has no public query


def reason_modules_are_unsupported(
    roots: Iterable[tuple[str, nn.Module]],
    linear_types: tuple[type[nn.Module], ...] | None,
    *,
    dtype: torch.dtype | None = None,
) -> str | None:
    """Return why an engine that replaces the forward pass of all modules below `roots` cannot do so, or `None`.

    Such an engine requires known modules, standard attention layers, linear layers of the given types (`None` allows
    all types), parameters of the given dtype (`None` allows all), and neither hooks nor taps in use. `roots` contains a
    name and a module each.
    """
    for root_name, root in roots:
        # This check runs before every generation, and names take longer to build than the check itself.
        for module in root.modules():
            reason = _reason_module_is_unsupported(module, linear_types, dtype)
            if reason is not None:
                name = next(name for name, other in root.named_modules(prefix=root_name) if other is module)
                return reason.format(name=name)
    return None


def _reason_module_is_unsupported(
    module: nn.Module, linear_types: tuple[type[nn.Module], ...] | None, dtype: torch.dtype | None
) -> str | None:
    """Return a reason that contains `{name}` in place of the module's name, or `None`."""
    if type(module) is Tap:  # first, because most modules are taps
        return "{name} is being recorded or changed" if has_hooks_or_is_active_tap(module) else None
    if not _is_known(type(module)):
        return f"{{name}} is a {type(module).__name__}, which only the eager implementation supports"
    if has_hooks_or_is_active_tap(module):
        return "{name} has a hook"
    if dtype is not None:
        for part, parameter in module._parameters.items():  # noqa: SLF001 - torch has no fast public query
            if parameter is not None and parameter.dtype != dtype:
                return f"requires {dtype} weights, but {{name}}.{part} is {parameter.dtype}"
    return _reason_layer_is_unsupported(module, linear_types)


def _reason_layer_is_unsupported(module: nn.Module, linear_types: tuple[type[nn.Module], ...] | None) -> str | None:
    match module:
        case Attention():
            if module.kernel is not AttentionKernel.FUSED:
                return f"{{name}} uses the attention kernel {module.kernel.value!r}"
            if module.head_config.combination is not HeadCombination.SPLIT:
                return f"head_combination={module.head_config.combination.value!r} is not supported"
            linears = ("q_proj", "k_proj", "v_proj", "out_proj")
        case FeedForward():
            linears = ("up_proj", "down_proj", "gate_proj")
        case _:
            return None
    for part in linears:
        linear = getattr(module, part)
        if linear is not None and linear_types is not None and type(linear) not in linear_types:
            return f"{{name}}.{part} is a {type(linear).__name__}"
    return None


@cache
def _is_known(module_type: type[nn.Module]) -> bool:
    # Modules of torch and of `accel` itself are checked by their users, which accept only certain linear layers.
    return module_type in KNOWN_MODULES or module_type.__module__.startswith(("torch.", "qkv.accel."))


def known_norm(norm: nn.Module) -> LayerNorm | RMSNorm:
    """Narrow the type of a norm. Models with other norms have been rejected by `reason_modules_are_unsupported`."""
    assert isinstance(norm, LayerNorm | RMSNorm)
    return norm


def tensor_version(tensor: Tensor) -> tuple[int, int]:
    """Return a key that changes if the tensor is replaced or modified, except for in-place changes through `.data`."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version  # noqa: SLF001
