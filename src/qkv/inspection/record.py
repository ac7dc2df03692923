"""Record activations at a model's taps without disabling the fused attention kernel."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from qkv.errors import TapError
from qkv.inspection.taps import match_taps
from qkv.inspection.validation import check_index
from qkv.nn import Attention, AttentionInputs, Tap
from qkv.tensors import AttentionWeights, HeadOutputs, Scores

T = TypeVar("T")


@dataclass(frozen=True)
class AttentionRecord:
    """The inputs and the result of one attention call.

    Stores queries and keys (2nd numbers) instead of the weights (hn²), which are recomputed on demand.
    """

    lookup: AttentionInputs
    heads: HeadOutputs
    """The kernel's result, which `error` compares with the recomputed one."""
    changed_scores: Scores | None = None
    """The actual scores if an intervention changed them, because they cannot be recomputed."""
    changed_weights: AttentionWeights | None = None

    def weights(self, rows: Sequence[int] | None = None) -> AttentionWeights:
        """Returns the attention weights of all queries or of the given rows, in at least float32."""
        return self._rows(rows, self.changed_weights, AttentionInputs.weights)

    def scores(self, rows: Sequence[int] | None = None) -> Scores:
        """Returns the attention scores before the softmax, with −∞ at masked positions."""
        return self._rows(rows, self.changed_scores, AttentionInputs.scores)

    @property
    def error(self) -> float:
        """max|A·V − output|: the largest difference between the recomputed result and the kernel's result."""
        lookup = _upcast_inputs(self.lookup)
        weights = lookup.weights() if self.changed_weights is None else self.changed_weights
        return (lookup.unfold_beams(lookup.weighted_values(weights)) - self.heads).abs().max().item()

    def _rows(
        self, rows: Sequence[int] | None, changed: Tensor | None, compute: Callable[[AttentionInputs], Tensor]
    ) -> Tensor:
        lookup = _upcast_inputs(self.lookup)
        if rows is None:
            return lookup.unfold_beams(compute(lookup) if changed is None else changed)
        n = lookup.queries.shape[-2] // lookup.beams_per_source
        rows = [check_index("row", row, n, of="queries") for row in rows]
        wanted = torch.tensor(rows, dtype=torch.long, device=lookup.queries.device)
        if changed is not None:
            return lookup.unfold_beams(changed)[:, :, wanted]
        return lookup.unfold_beams(compute(lookup.select_queries(wanted)))


def _upcast_inputs(lookup: AttentionInputs) -> AttentionInputs:
    if lookup.queries.dtype in (torch.float32, torch.float64):
        return lookup
    return replace(
        lookup,
        queries=lookup.queries.float(),
        keys=lookup.keys.float(),
        values=lookup.values.float(),
        bias=None if lookup.bias is None else lookup.bias.float(),
    )


class ActivationRecord:
    """Recorded activations by tap name: `activations["blocks.0.resid_mid"]` returns those of the last forward pass."""

    def __init__(self) -> None:
        self._passes: dict[str, list[Tensor]] = {}
        self._attention: dict[str, list[AttentionRecord]] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self.at(name)

    def at(self, name: str, index: int = -1) -> Tensor:
        """Returns the activations of one of several forward passes, such as decode steps. Defaults to the last one."""
        part, _, last = name.rpartition(".")
        if part in self._attention and last in ("scores", "weights"):
            seen = self.attention(part, index)
            return seen.weights() if last == "weights" else seen.scores()
        return self._pick(self._passes, name, index)

    def attention(self, name: str, index: int = -1) -> AttentionRecord:
        """Returns the record of an attention module, such as `blocks.0.attention`, whose weights were recorded."""
        return self._pick(self._attention, name, index)

    @property
    def names(self) -> list[str]:
        of_attention = [f"{name}.{last}" for name in self._attention for last in ("scores", "weights")]
        return [*self._passes, *of_attention]

    def n_passes(self, name: str) -> int:
        part, _, last = name.rpartition(".")
        if part in self._attention and last in ("scores", "weights"):
            name = part
        return len(self._passes.get(name) or self._attention.get(name, []))

    def _pick(self, kept: dict[str, list[T]], name: str, index: int) -> T:
        if name not in kept:
            raise TapError(
                f"no activations were recorded at '{name}', recorded taps: {', '.join(self.names) or 'none'}"
            )
        try:
            return kept[name][index]
        except IndexError:
            raise TapError(f"pass {index} of '{name}' does not exist, {len(kept[name])} passes were recorded") from None

    def _keep(self, name: str) -> Callable[[Tensor], None]:
        # Keys and values may be views of the KV cache, which later passes overwrite.
        is_of_cache = name.endswith((".keys", ".values"))

        def keep(passing: Tensor) -> None:
            passing = passing.detach()
            self._passes.setdefault(name, []).append(passing.clone() if is_of_cache else passing)

        return keep

    def _keep_attention(self, name: str, attention: Attention) -> list[Callable[[], None]]:
        now: dict[str, AttentionInputs] = {}
        changed: dict[str, Tensor] = {}

        def start(lookup: AttentionInputs) -> None:
            changed.clear()
            now["lookup"] = _detach_inputs(lookup)

        def keep_changed(what: str, passing: Tensor) -> None:
            if attention.scores.has_interventions or attention.weights.has_interventions:
                changed[what] = passing.detach()

        def finish(heads: Tensor) -> None:
            seen = AttentionRecord(now.pop("lookup"), heads.detach(), changed.get("scores"), changed.get("weights"))
            self._attention.setdefault(name, []).append(seen)

        return [
            attention.inputs.observe(start),
            attention.scores.observe_if_computed(lambda passing: keep_changed("scores", passing)),
            attention.weights.observe_if_computed(lambda passing: keep_changed("weights", passing)),
            attention.head_outputs.observe(finish),
        ]


def _detach_inputs(lookup: AttentionInputs) -> AttentionInputs:
    # Copied for the same reason as in `_keep`.
    keys, values = (part.detach().clone() for part in (lookup.keys, lookup.values))
    bias = None if lookup.bias is None else lookup.bias.detach()
    return replace(lookup, queries=lookup.queries.detach(), keys=keys, values=values, bias=bias)


@contextmanager
def record(model: nn.Module, *patterns: str) -> Iterator[ActivationRecord]:
    """Record the taps that match the patterns within the `with` block. Without patterns, records all taps.

    Usage: `with record(model, "blocks.*.attention.weights") as activations: model(ids)`. The fused kernel stays in use:
    queries and keys are recorded, and scores and weights are recomputed from them.
    """
    trace = ActivationRecord()
    parts = dict(model.named_modules())
    attentions: dict[str, Attention] = {}
    with ExitStack() as stack:
        for name, tap in _select_taps(model, patterns).items():
            part, _, last = name.rpartition(".")
            owner = parts[part]
            if isinstance(owner, Attention) and last in ("inputs", "scores", "weights"):
                attentions[part] = owner
            else:
                stack.callback(tap.observe(trace._keep(name)))  # noqa: SLF001
        for name, attention in attentions.items():
            for end in trace._keep_attention(name, attention):  # noqa: SLF001
                stack.callback(end)
        yield trace


def _select_taps(model: nn.Module, patterns: tuple[str, ...]) -> dict[str, Tap]:
    found = [match_taps(model, pattern) for pattern in patterns or ("*",)]
    return {name: tap for one in found for name, tap in one.items()}
