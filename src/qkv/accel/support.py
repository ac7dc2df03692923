"""Conditions that decide whether a fast path supports a model, shared by all backends."""

from collections.abc import Iterable

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
    roots: Iterable[tuple[str, nn.Module]], linear_types: tuple[type[nn.Module], ...] | None
) -> str | None:
    """Return why an engine that replaces the forward pass of all modules below `roots` cannot do so, or `None`.

    Such an engine requires known modules, standard attention layers, linear layers of the given types (`None` allows
    all types), and neither hooks nor taps in use. `roots` contains a name and a module each.
    """
    for root_name, root in roots:
        for name, module in root.named_modules(prefix=root_name):
            if not _is_known(module):
                return f"{name} is a {type(module).__name__}, which only the eager implementation supports"
            if has_hooks_or_is_active_tap(module):
                return f"{name} has a hook" if not isinstance(module, Tap) else f"{name} is being recorded or changed"
            linears: list[tuple[str, nn.Module | None]] = []
            if isinstance(module, Attention):
                if module.kernel is not AttentionKernel.FUSED:
                    return f"{name} uses the attention kernel {module.kernel.value!r}"
                if module.head_config.combination is not HeadCombination.SPLIT:
                    return f"head_combination={module.head_config.combination.value!r} is not supported"
                linears = [(part, getattr(module, part)) for part in ("q_proj", "k_proj", "v_proj", "out_proj")]
            elif isinstance(module, FeedForward):
                linears = [(part, getattr(module, part)) for part in ("up_proj", "down_proj", "gate_proj")]
            for part, linear in linears:
                if linear is not None and linear_types is not None and type(linear) not in linear_types:
                    return f"{name}.{part} is a {type(linear).__name__}"
    return None


def _is_known(module: nn.Module) -> bool:
    # Modules of torch and of `accel` itself are checked by their users, which accept only certain linear layers.
    return type(module) in KNOWN_MODULES or type(module).__module__.startswith(("torch.", "qkv.accel."))


def known_norm(norm: nn.Module) -> LayerNorm | RMSNorm:
    """Narrow the type of a norm. Models with other norms have been rejected by `reason_modules_are_unsupported`."""
    assert isinstance(norm, LayerNorm | RMSNorm)
    return norm


def tensor_version(tensor: Tensor) -> tuple[int, int]:
    """Return a key that changes if the tensor is replaced or modified, except for in-place changes through `.data`."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version  # noqa: SLF001
