"""Context managers that replace activations: patch taps, ablate heads, mask attention."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from torch import Tensor, nn

from qkv.errors import TapError
from qkv.inspection.taps import match_taps
from qkv.nn import Attention, AttentionInputs, Mask

Replacement = Callable[[Tensor], Tensor] | Tensor | float
"""A function of the activation, a tensor that replaces it, or a number to fill it with."""


@contextmanager
def intervene(model: nn.Module, changes: Mapping[str, Replacement]) -> Iterator[None]:
    """Replace the activations of all taps that match each pattern, within the `with` block.

    `intervene(model, {"blocks.2.attention_out": 0.0})` ablates a layer's attention, and
    `intervene(model, {"blocks.3.resid_pre": activations["blocks.3.resid_pre"]})` patches in the activations of another text.
    """
    with ExitStack() as stack:
        for pattern, what in changes.items():
            for name, tap in match_taps(model, pattern).items():
                if name.endswith(".inputs"):
                    raise TapError(f"'{name}' carries a whole look-up; change its parts, or use cut_edge")
                stack.callback(tap.intervene(_make_replacer(name, what)))
        yield


def _make_replacer(name: str, what: Replacement) -> Callable[[Tensor], Tensor]:
    def put(passing: Tensor) -> Tensor:
        match what:
            case Tensor():
                new = what.to(passing)
            case int() | float():
                new = passing.new_full(passing.shape, what)
            case _:
                new = what(passing)
        if new.shape != passing.shape:
            raise TapError(
                f"'{name}' has shape {tuple(passing.shape)}, but its replacement has shape {tuple(new.shape)}"
            )
        return new

    return put


@contextmanager
def ablate_head(model: nn.Module, attention: str, head: int) -> Iterator[None]:
    """Ablate one head: its result is zero before the output projection."""

    def silence(heads: Tensor) -> Tensor:
        heads = heads.clone()
        heads[:, head] = 0.0
        return heads

    with ExitStack() as stack:
        for name, part in _match_attentions(model, attention).items():
            _check_head_index(name, part, head)
            stack.callback(part.head_outputs.intervene(silence))
        yield


@contextmanager
def mask_attention(
    model: nn.Module, attention: str, *, query: int, key: int, head: int | None = None
) -> Iterator[None]:
    """Mask attention from position `query` to position `key` in the matching layers, for one head or all.

    Positions count the input ids. With a cache, padding is not counted. The fused kernel stays in use. If no forward pass
    reaches the edge, the end of the `with` block raises `TapError`.
    """
    reached: list[bool] = []

    def cut(lookup: AttentionInputs) -> AttentionInputs:
        batch, n_heads, n_queries, _ = lookup.queries.shape
        n_keys = lookup.keys.shape[-2]
        looks = lookup.broadcast_query_positions() == query
        if not (0 <= key < n_keys and bool(looks.any())):
            return lookup
        reached.append(True)
        seen = (lookup.mask or Mask()).to_dense(n_queries, n_keys, lookup.queries.device)
        seen = seen.expand(batch, n_heads, n_queries, n_keys).clone()
        heads = slice(None) if head is None else slice(head, head + 1)
        seen[:, heads, :, key] &= ~looks[:, None]
        return replace(lookup, mask=Mask(dense=seen))

    with ExitStack() as stack:
        for name, part in _match_attentions(model, attention).items():
            if head is not None:
                _check_head_index(name, part, head)
            stack.callback(part.inputs.intervene(cut))
        yield
    if not reached:
        raise TapError(f"no forward pass reached the edge {query}→{key} of '{attention}'")


def _check_head_index(name: str, part: Attention, head: int) -> None:
    n_heads = part.head_config.n_heads
    if not 0 <= head < n_heads:
        raise TapError(f"'{name}' has {n_heads} heads (0 … {n_heads - 1}), got head {head}")


def _match_attentions(model: nn.Module, pattern: str) -> dict[str, Attention]:
    parts = dict(model.named_modules())
    found = {}
    for name in match_taps(model, f"{pattern}.inputs"):
        owner = parts[name.removesuffix(".inputs")]
        if isinstance(owner, Attention):
            found[name.removesuffix(".inputs")] = owner
    return found
