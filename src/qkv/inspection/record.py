"""Recording what passes a model's taps, with the fused kernel on."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from qkv.errors import InputError, TapError
from qkv.inspection.names import matching, taps
from qkv.nn import Attention, Lookup
from qkv.tensors import HeadResults, Weights

T = TypeVar("T")


@dataclass(frozen=True)
class SeenAttention:
    """One attention as it happened: what was compared, and what the kernel made of it.

    Keeps queries and keys (2nd numbers), not the weights (hn²); weights are computed when asked for.
    """

    lookup: Lookup
    heads: HeadResults
    """The kernel's own result, against which `error` measures."""

    def weights(self, rows: Sequence[int] | None = None) -> Weights:
        """The attention weights in at least float32, of all queries or of some."""
        lookup = _precise(self.lookup)
        if rows is not None:
            n = lookup.queries.shape[-2]
            outside = [row for row in rows if not 0 <= row < n]
            if outside:
                raise InputError(f"row {outside[0]} is outside the {n} queries (0 … {n - 1})")
            lookup = lookup.rows(torch.tensor(rows, device=lookup.queries.device))
        return lookup.weights()

    @property
    def error(self) -> float:
        """max|A·V − output|: how far the weights shown are from what the kernel did."""
        lookup = _precise(self.lookup)
        return (lookup.mix(lookup.weights()) - self.heads).abs().max().item()


def _precise(lookup: Lookup) -> Lookup:
    if lookup.queries.dtype in (torch.float32, torch.float64):
        return lookup
    return replace(
        lookup, queries=lookup.queries.float(), keys=lookup.keys.float(), values=lookup.values.float(),
        bias=None if lookup.bias is None else lookup.bias.float(),
    )  # fmt: skip


class Trace:
    """What was recorded, by tap name: `trace["blocks.0.residual_mid"]`, the last pass unless told otherwise."""

    def __init__(self) -> None:
        self._passes: dict[str, list[Tensor]] = {}
        self._attention: dict[str, list[SeenAttention]] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self.at(name)

    def at(self, name: str, index: int = -1) -> Tensor:
        """What passed at one of several passes, such as the steps of a generation; the last by default."""
        part, _, last = name.rpartition(".")
        if last == "weights" and part in self._attention:
            return self.attention(part, index).weights()
        return _pick(self._passes, name, index)

    def attention(self, name: str, index: int = -1) -> SeenAttention:
        """The attention of that name (`blocks.0.attention`), recorded by asking for its weights."""
        return _pick(self._attention, name, index)

    @property
    def names(self) -> list[str]:
        return [*self._passes, *(f"{name}.weights" for name in self._attention)]

    def n_passes(self, name: str) -> int:
        part, _, _ = name.rpartition(".")
        return len(self._passes.get(name) or self._attention.get(name) or self._attention.get(part, []))

    def _keep(self, name: str) -> Callable[[Tensor], None]:
        return lambda passing: self._passes.setdefault(name, []).append(passing.detach())

    def _keep_attention(self, name: str, attention: Attention) -> list[Callable[[], None]]:
        waiting: list[Lookup] = []

        def finish(heads: Tensor) -> None:
            self._attention.setdefault(name, []).append(SeenAttention(_detached(waiting.pop()), heads.detach()))

        return [attention.lookup.watch(waiting.append), attention.heads.watch(finish)]


def _detached(lookup: Lookup) -> Lookup:
    # A cache's slots are written again by later passes of other texts, so keys and values are copied out of it.
    keys, values = (part.detach().clone() for part in (lookup.keys, lookup.values))
    return replace(lookup, queries=lookup.queries.detach(), keys=keys, values=values)


def _pick(kept: dict[str, list[T]], name: str, index: int) -> T:
    if name not in kept:
        raise TapError(f"nothing was recorded at '{name}'; recorded: {', '.join(kept) or 'nothing'}")
    try:
        return kept[name][index]
    except IndexError:
        raise TapError(f"pass {index} of '{name}' was asked for, {len(kept[name])} were recorded") from None


@contextmanager
def record(model: nn.Module, *patterns: str) -> Iterator[Trace]:
    """Record the taps meant by the patterns while the `with` lasts; all taps of tensors if there is none.

    `with record(model, "blocks.*.attention.weights") as trace: model(ids)`. Asking for weights keeps the fused
    kernel on: queries and keys are recorded and the weights recomputed from them.
    """
    trace = Trace()
    parts = dict(model.named_modules())
    with ExitStack() as stack:
        for name in _wanted(model, patterns):
            part, _, last = name.rpartition(".")
            owner = parts[part]
            if isinstance(owner, Attention) and last in ("weights", "lookup"):
                for end in trace._keep_attention(part, owner):  # noqa: SLF001
                    stack.callback(end)
            else:
                stack.callback(taps(model)[name].watch(trace._keep(name)))  # noqa: SLF001
        yield trace


def _wanted(model: nn.Module, patterns: tuple[str, ...]) -> list[str]:
    if patterns:
        named = [name for pattern in patterns for name in matching(model, pattern)]
    else:
        # Scores exist on the plain road alone; recording everything must not leave the fused one.
        named = [name for name in taps(model) if not name.endswith((".lookup", ".scores"))]
    return list(dict.fromkeys(named))
