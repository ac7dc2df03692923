"""Changing what passes a model's taps: patch, switch off a head, forbid an edge."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from torch import Tensor, nn

from qkv.errors import TapError
from qkv.inspection.taps import match_taps
from qkv.nn import Attention, AttentionInputs, Mask

Replacement = Callable[[Tensor], Tensor] | Tensor | float
"""A function of what passes, a tensor to put in its place, or a number to fill it with."""


@contextmanager
def intervene(model: nn.Module, changes: Mapping[str, Replacement]) -> Iterator[None]:
    """Inside the `with`, the taps meant by each pattern pass on something else.

    `intervene(model, {"blocks.2.attention_out": 0.0})` silences a layer's attention;
    `{"blocks.3.resid_pre": trace["blocks.3.resid_pre"]}` patches in what another text had there.
    """
    with ExitStack() as stack:
        for pattern, what in changes.items():
            for name, tap in match_taps(model, pattern).items():
                if name.endswith(".lookup"):
                    raise TapError(f"'{name}' carries a whole look-up; change its parts, or use cut_edge")
                stack.callback(tap.change(_make_replacer(name, what)))
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
            raise TapError(f"'{name}' passes shape {tuple(passing.shape)}, the change gave {tuple(new.shape)}")
        return new

    return put


@contextmanager
def ablate_head(model: nn.Module, attention: str, head: int) -> Iterator[None]:
    """One head writes nothing: its result is zero before the output projection."""

    def silence(heads: Tensor) -> Tensor:
        heads = heads.clone()
        heads[:, head] = 0.0
        return heads

    with ExitStack() as stack:
        for name, part in _match_attentions(model, attention).items():
            _check_head_index(name, part, head)
            stack.callback(part.heads.change(silence))
        yield


@contextmanager
def mask_attention(model: nn.Module, attention: str, *, query: int, key: int, head: int | None = None) -> Iterator[None]:
    """The token at position `query` may not look at `key`, in the attentions meant, for one head or all.

    Positions are counted as the ids were given; with a cache, padding is left out of the count.
    The fused kernel stays on. A cut that no pass ever reached is an error at the end of the `with`.
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
            stack.callback(part.lookup.change(cut))
        yield
    if not reached:
        raise TapError(f"the edge {query}→{key} of '{attention}' was never reached by a pass")


def _check_head_index(name: str, part: Attention, head: int) -> None:
    n_heads = part.head_config.n_heads
    if not 0 <= head < n_heads:
        raise TapError(f"'{name}' has {n_heads} heads (0 … {n_heads - 1}), head {head} was asked for")


def _match_attentions(model: nn.Module, pattern: str) -> dict[str, Attention]:
    parts = dict(model.named_modules())
    found = {}
    for name in match_taps(model, f"{pattern}.lookup"):
        owner = parts[name.removesuffix(".lookup")]
        if isinstance(owner, Attention):
            found[name.removesuffix(".lookup")] = owner
    return found
