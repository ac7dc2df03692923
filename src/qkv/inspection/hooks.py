"""Context managers that replace activations by patching taps, ablating heads or masking attention."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from qkv.errors import AttentionEdgeNotReachedError, TapError
from qkv.inspection.taps import match_taps
from qkv.nn import Attention, AttentionInputs, Mask
from qkv.tensors import QueryPositions

Replacement = Callable[[Tensor], Tensor] | Tensor | float
"""A function that maps an activation to its replacement, a replacement tensor, or a number for all elements."""


@contextmanager
def intervene(model: nn.Module, replacements: Mapping[str, Replacement]) -> Iterator[None]:
    """Replace the activations at all taps that match the given patterns, within the `with` block.

    `intervene(model, {"blocks.2.attention_out": 0.0})` ablates a layer's attention, and `intervene(model,
    {"blocks.3.resid_pre": cache["blocks.3.resid_pre"]})` patches in the activations of another text.
    """
    with ExitStack() as stack:
        for pattern, replacement in replacements.items():
            for name, tap in match_taps(model, pattern).items():
                if name.endswith(".inputs"):
                    raise TapError(
                        f"'{name}' cannot be replaced because it contains all attention inputs; replace its queries, "
                        "keys or values, or use mask_attention"
                    )
                stack.callback(tap.intervene(_make_replacer(name, replacement)))
        yield


def _make_replacer(name: str, replacement: Replacement) -> Callable[[Tensor], Tensor]:
    def replace_activation(activation: Tensor) -> Tensor:
        match replacement:
            case Tensor():
                new = replacement.to(activation)
            case int() | float():
                new = activation.new_full(activation.shape, replacement)
            case _:
                new = replacement(activation)
        if new.shape != activation.shape:
            raise TapError(
                f"the replacement of '{name}' must have shape {tuple(activation.shape)}, got {tuple(new.shape)}"
            )
        return new

    return replace_activation


@contextmanager
def ablate_head(model: nn.Module, module_pattern: str, head: int) -> Iterator[None]:
    """Ablate one head by setting its result to zero before the output projection."""

    def zero_head(heads: Tensor) -> Tensor:
        heads = heads.clone()
        heads[:, head] = 0.0
        return heads

    with ExitStack() as stack:
        for name, attention in _match_attentions(model, module_pattern).items():
            _check_head_index(name, attention, head)
            stack.callback(attention.head_outputs.intervene(zero_head))
        yield


@contextmanager
def mask_attention(
    model: nn.Module, module_pattern: str, *, query: int, key: int, head: int | None = None
) -> Iterator[None]:
    """Mask attention from position `query` to position `key` in one head or all heads of the matching layers.

    Positions refer to the input ids. If a cache is used, padding is not counted. The fused kernel remains in use. If no
    forward pass computes this query–key pair, `AttentionEdgeNotReachedError` is raised at the end of the `with` block.
    """
    reached: list[bool] = []

    def mask_edge(inputs: AttentionInputs) -> AttentionInputs:
        batch, n_heads, n_queries, _ = inputs.queries.shape
        n_keys = inputs.keys.shape[-2]
        is_query = _broadcast_query_positions(inputs) == query
        if not (0 <= key < n_keys and bool(is_query.any())):
            return inputs
        reached.append(True)
        visible = (inputs.mask or Mask()).to_dense(n_queries, n_keys, inputs.queries.device)
        visible = visible.expand(batch, n_heads, n_queries, n_keys).clone()
        heads = slice(None) if head is None else slice(head, head + 1)
        visible[:, heads, :, key] &= ~is_query[:, None]
        return replace(inputs, mask=Mask(dense=visible))

    with ExitStack() as stack:
        for name, attention in _match_attentions(model, module_pattern).items():
            if head is not None:
                _check_head_index(name, attention, head)
            stack.callback(attention.inputs.intervene(mask_edge))
        yield
    if not reached:
        raise AttentionEdgeNotReachedError(
            f"cannot mask attention from query {query} to key {key} of '{module_pattern}' because no forward pass "
            "computed it"
        )


def _check_head_index(name: str, attention: Attention, head: int) -> None:
    n_heads = attention.head_config.n_heads
    if not 0 <= head < n_heads:
        raise TapError(f"'{name}' has {n_heads} heads (0 … {n_heads - 1}), got head {head}")


def _match_attentions(model: nn.Module, pattern: str) -> dict[str, Attention]:
    modules = dict(model.named_modules())
    attentions = {}
    for name in match_taps(model, f"{pattern}.inputs"):
        module = modules[name.removesuffix(".inputs")]
        if isinstance(module, Attention):
            attentions[name.removesuffix(".inputs")] = module
    return attentions


def _broadcast_query_positions(inputs: AttentionInputs) -> QueryPositions:
    """Return the position of every query within its own sequence, expanded to (batch, query)."""
    n = inputs.queries.shape[-2] // inputs.beams_per_source
    positions = inputs.query_positions
    if positions is None:
        positions = torch.arange(n, device=inputs.queries.device)[None]
    n_sequences = inputs.queries.shape[0] * inputs.beams_per_source
    return positions.expand(n_sequences, n).reshape(inputs.queries.shape[0], -1)
