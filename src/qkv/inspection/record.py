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
from qkv.nn import Attention, AttentionInputs, Mask, Tap
from qkv.tensors import AttentionWeights, HeadOutputs, Scores

T = TypeVar("T")


@dataclass(frozen=True)
class AttentionRecord:
    """The inputs and the result of one attention call.

    The record contains the queries and keys (2·n·d numbers) instead of the weights (h·n² numbers), which are recomputed
    when needed.
    """

    inputs: AttentionInputs
    head_outputs: HeadOutputs
    """The result of the kernel, with which `reconstruction_error` compares the recomputed result."""
    changed_scores: Scores | None = None
    """The actual scores if an intervention changed them. Changed scores cannot be recomputed from the inputs."""
    changed_weights: AttentionWeights | None = None

    def weights(self, rows: Sequence[int] | None = None) -> AttentionWeights:
        """Return the attention weights of all queries or of the given rows, in at least float32 precision."""
        return self._compute_rows(rows, self.changed_weights, AttentionInputs.weights)

    def scores(self, rows: Sequence[int] | None = None) -> Scores:
        """Return the attention scores before the softmax, with −∞ at masked positions."""
        return self._compute_rows(rows, self.changed_scores, AttentionInputs.scores)

    @property
    def reconstruction_error(self) -> float:
        """The largest difference between the recomputed result and the kernel's result, max|A·V − output|."""
        inputs = _upcast_inputs(self.inputs)
        weights = inputs.weights() if self.changed_weights is None else self.changed_weights
        return (inputs.unfold_beams(inputs.weighted_values(weights)) - self.head_outputs).abs().max().item()

    def _compute_rows(
        self, rows: Sequence[int] | None, changed: Tensor | None, compute: Callable[[AttentionInputs], Tensor]
    ) -> Tensor:
        inputs = _upcast_inputs(self.inputs)
        if rows is None:
            return inputs.unfold_beams(compute(inputs) if changed is None else changed)
        n = inputs.queries.shape[-2] // inputs.beams_per_source
        rows = [check_index("row", row, n, unit="queries") for row in rows]
        row_ids = torch.tensor(rows, dtype=torch.long, device=inputs.queries.device)
        if changed is not None:
            return inputs.unfold_beams(changed)[:, :, row_ids]
        return inputs.unfold_beams(compute(select_queries(inputs, row_ids)))


def select_queries(inputs: AttentionInputs, query_indices: Tensor) -> AttentionInputs:
    """Return the inputs restricted to the given query indices of each sequence."""
    n = inputs.queries.shape[-2] // inputs.beams_per_source
    starts = torch.arange(0, inputs.beams_per_source * n, n, device=query_indices.device)
    positions = query_indices[None] if inputs.query_positions is None else inputs.query_positions[:, query_indices]
    folded = (starts[:, None] + query_indices).flatten()
    mask = inputs.mask
    if mask is not None:
        visible = mask.to_dense(inputs.queries.shape[-2], inputs.keys.shape[-2], inputs.queries.device)
        mask = Mask(dense=visible if visible.shape[2] == 1 else visible[:, :, folded])
    bias = inputs.bias if inputs.bias is None or inputs.bias.shape[2] == 1 else inputs.bias[:, :, folded]
    return replace(inputs, queries=inputs.queries[:, :, folded], mask=mask, bias=bias, query_positions=positions)


def _upcast_inputs(inputs: AttentionInputs) -> AttentionInputs:
    if inputs.queries.dtype in (torch.float32, torch.float64):
        return inputs
    return replace(
        inputs,
        queries=inputs.queries.float(),
        keys=inputs.keys.float(),
        values=inputs.values.float(),
        bias=None if inputs.bias is None else inputs.bias.float(),
    )


class ActivationRecord:
    """Recorded activations, keyed by tap name: `cache["blocks.0.resid_mid"]` returns those from the last pass."""

    def __init__(self) -> None:
        self._passes: dict[str, list[Tensor]] = {}
        self._attention: dict[str, list[AttentionRecord]] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self.get_pass(name)

    def get_pass(self, name: str, pass_index: int = -1) -> Tensor:
        """Return the activations from one forward pass, which defaults to the last one.

        Each decode step is a separate forward pass.
        """
        module_name, _, tap_name = name.rpartition(".")
        if module_name in self._attention and tap_name in ("scores", "weights"):
            attention_record = self.attention(module_name, pass_index)
            return attention_record.weights() if tap_name == "weights" else attention_record.scores()
        return self._select_pass(self._passes, name, pass_index)

    def attention(self, name: str, pass_index: int = -1) -> AttentionRecord:
        """Return the record of an attention module, such as `blocks.0.attention`, whose attention was recorded."""
        return self._select_pass(self._attention, name, pass_index)

    @property
    def names(self) -> list[str]:
        attention_taps = [f"{name}.{tap_name}" for name in self._attention for tap_name in ("scores", "weights")]
        return [*self._passes, *attention_taps]

    def n_passes(self, name: str) -> int:
        module_name, _, tap_name = name.rpartition(".")
        if module_name in self._attention and tap_name in ("scores", "weights"):
            name = module_name
        return len(self._passes.get(name) or self._attention.get(name, []))

    def _select_pass(self, recorded: dict[str, list[T]], name: str, pass_index: int) -> T:
        if name not in recorded:
            raise TapError(
                f"no activations were recorded at '{name}'; recorded taps: {', '.join(self.names) or 'none'}"
            )
        try:
            return recorded[name][pass_index]
        except IndexError:
            raise TapError(
                f"pass {pass_index} of '{name}' does not exist; {len(recorded[name])} passes were recorded"
            ) from None

    def _make_recorder(self, name: str) -> Callable[[Tensor], None]:
        # Keys and values may be views of the KV cache, which later passes overwrite.
        is_cache_view = name.endswith((".keys", ".values"))

        def keep(activation: Tensor) -> None:
            activation = activation.detach()
            self._passes.setdefault(name, []).append(activation.clone() if is_cache_view else activation)

        return keep

    def _observe_attention(self, name: str, attention: Attention) -> list[Callable[[], None]]:
        pending: dict[str, AttentionInputs] = {}
        changed: dict[str, Tensor] = {}

        def start(inputs: AttentionInputs) -> None:
            changed.clear()
            pending["inputs"] = _detach_inputs_clone_keys_values(inputs)

        def keep_changed(tap: str, activation: Tensor) -> None:
            if attention.scores.interventions or attention.weights.interventions:
                changed[tap] = activation.detach()

        def finish(heads: Tensor) -> None:
            attention_record = AttentionRecord(
                pending.pop("inputs"), heads.detach(), changed.get("scores"), changed.get("weights")
            )
            self._attention.setdefault(name, []).append(attention_record)

        return [
            attention.inputs.observe(start),
            attention.scores.observe_if_computed(lambda activation: keep_changed("scores", activation)),
            attention.weights.observe_if_computed(lambda activation: keep_changed("weights", activation)),
            attention.head_outputs.observe(finish),
        ]


def _detach_inputs_clone_keys_values(inputs: AttentionInputs) -> AttentionInputs:
    # Copy the keys and values because later passes may overwrite them in the KV cache.
    keys, values = (tensor.detach().clone() for tensor in (inputs.keys, inputs.values))
    bias = None if inputs.bias is None else inputs.bias.detach()
    return replace(inputs, queries=inputs.queries.detach(), keys=keys, values=values, bias=bias)


@contextmanager
def record(model: nn.Module, *patterns: str) -> Iterator[ActivationRecord]:
    """Record the activations at the taps that match the patterns, or at all taps, within the `with` block.

    Usage: `with record(model, "blocks.*.attention.weights") as cache: model(ids)`. The fused kernel remains in use
    because only queries and keys are recorded, from which scores and weights are recomputed.
    """
    activations = ActivationRecord()
    modules = dict(model.named_modules())
    attentions: dict[str, Attention] = {}
    with ExitStack() as stack:
        for name, tap in _select_taps(model, patterns).items():
            module_name, _, tap_name = name.rpartition(".")
            module = modules[module_name]
            if isinstance(module, Attention) and tap_name in ("inputs", "scores", "weights"):
                attentions[module_name] = module
            else:
                stack.callback(tap.observe(activations._make_recorder(name)))  # noqa: SLF001
        for name, attention in attentions.items():
            for remove_hook in activations._observe_attention(name, attention):  # noqa: SLF001
                stack.callback(remove_hook)
        yield activations


def _select_taps(model: nn.Module, patterns: tuple[str, ...]) -> dict[str, Tap]:
    matches = [match_taps(model, pattern) for pattern in patterns or ("*",)]
    return {name: tap for taps in matches for name, tap in taps.items()}
