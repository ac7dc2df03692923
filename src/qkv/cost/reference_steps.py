"""Predict the time of a step of a fast backend from measured steps of reference models.

A fast backend fuses kernels and may replay a step as one CUDA graph, so its time is not a sum of kernel times. It is
therefore calibrated with complete steps of models that differ in width, number of layers, vocabulary size, number of
tokens and number of cached keys. The differences between these steps give the time of one layer, of the logits and of
the attention over additional keys (`ReferenceModel`).

On a GPU, most steps that are not captured take as long as the CPU needs to launch their kernels, whatever their size.
Their differences therefore give the launch overhead of the backend (`ReferenceLaunches`), and the time that the GPU
computes is predicted from its kernels.
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from qkv.config import BERTConfig, ModelConfig, Seq2SeqConfig
from qkv.cost.calibration import (
    D_HEAD,
    REFERENCE_LENGTH,
    REFERENCE_VOCAB_SIZE,
    ReferenceStep,
    TimingTable,
    TimingTableBuilder,
)
from qkv.cost.operations import list_operations
from qkv.cost.workload import Mode, Precision, Workload

MIN_SECONDS = 1e-9
"""Smallest difference between two steps. Noise may make the difference negative."""


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """The predicted time of a step in seconds, without attention over more keys than in the reference steps."""

    base: float
    """Time outside the layers and the logits, such as the launch of a captured step and the choice of the token."""
    encoder_layers: float
    layers: float
    logits: float
    attention: float
    """Time of attention over additional cached keys in a decode step."""


class ReferenceModel:
    """The parameters of one backend for one model family and mode, computed from its reference steps."""

    def __init__(self, steps: Iterable[ReferenceStep]) -> None:
        base: dict[tuple[int, ...], float] = {}
        layer, encoder_layer, logits = base.copy(), base.copy(), base.copy()
        long_groups = []
        for group in _group_by_size(steps):
            if group[0].mode is Mode.DECODE and group[0].seq_len > REFERENCE_LENGTH:
                long_groups.append(group)
                continue
            if not _has_several_depths(group):
                continue
            parts = _GroupParts(group)
            d_model, (tokens, source_tokens) = group[0].d_model, parts.tokens
            layer[tokens, parts.layer_weights] = parts.layer
            if parts.encoder_layer is not None:
                encoder_layer[source_tokens, parts.encoder_layer_weights] = parts.encoder_layer
            base[source_tokens or tokens, d_model] = parts.base
            if parts.logits is not None:
                logits[parts.logit_rows, parts.logit_weights] = parts.logits
        self._base, self._layer = _table(base), _table(layer)
        self._encoder_layer = _table(encoder_layer) if encoder_layer else None
        self._logits = _table(logits) if logits else None
        self._attention = self._attention_by_n_keys(long_groups)

    def predict(self, config: ModelConfig, workload: Workload) -> StepParts:
        """Predict the parts of a step."""
        tokens, source_tokens = _n_tokens(config, workload)
        encoder_weights, weights = _weights_per_layer(config, workload)
        encoder_layers = 0.0
        if encoder_weights and self._encoder_layer is not None:
            assert isinstance(config, Seq2SeqConfig)
            encoder_layers = config.n_encoder_layers * self._encoder_layer.interpolate(source_tokens, encoder_weights)
        n_layers = config.n_decoder_layers if isinstance(config, Seq2SeqConfig) else config.n_layers  # type: ignore[union-attr]
        logit_rows, logit_weights = _logit_rows_and_weights(config, workload)
        logits = 0.0
        if logit_weights and self._logits is not None:
            # Unlike a layer, the logits have no fixed cost: it is part of the base.
            smallest = self._logits.axes[1][0]
            logits = self._logits.interpolate(logit_rows, logit_weights) * min(1.0, logit_weights / smallest)
        return StepParts(
            base=self._base.interpolate(source_tokens or tokens, config.d_model),
            encoder_layers=encoder_layers,
            layers=n_layers * self._layer.interpolate(tokens, weights),
            logits=logits,
            attention=n_layers * self._attention_seconds(config, workload),
        )

    def _attention_by_n_keys(self, groups: list[list[ReferenceStep]]) -> dict[int, TimingTable]:
        """Return tables of the time per layer for attention over so many keys, by the number of heads in the batch."""
        seconds: dict[int, dict[tuple[int, ...], float]] = {}
        for group in groups:
            if len(group) == 1:
                continue
            few, many = sorted(group, key=lambda step: step.n_layers)
            workload = few.workload(Precision.FLOAT32)
            _, weights = _weights_per_layer(few.config(), workload)
            extra = _seconds_per_layer(few, many) - self._layer.interpolate(few.batch_size, weights)
            n_heads = few.batch_size * few.d_model // D_HEAD
            seconds.setdefault(few.seq_len, {})[(n_heads,)] = max(MIN_SECONDS, extra)
        return {n_keys: _table(points) for n_keys, points in sorted(seconds.items())}

    def _attention_seconds(self, config: ModelConfig, workload: Workload) -> float:
        """Return the time of attention over cached keys in one layer, which grows linearly between two lengths."""
        n_keys = workload.seq_len
        if workload.mode is not Mode.DECODE or not self._attention or n_keys <= REFERENCE_LENGTH:
            return 0.0
        assert not isinstance(config, BERTConfig)
        n_heads = workload.batch_size * config.n_heads  # type: ignore[union-attr]
        points = [(REFERENCE_LENGTH, 0.0)]
        points += [(length, table.interpolate(n_heads)) for length, table in self._attention.items()]
        upper = next((i for i, (length, _) in enumerate(points) if length >= n_keys), len(points) - 1)
        (left, low), (right, high) = points[upper - 1], points[upper]
        seconds = low + max(0.0, high - low) * (n_keys - left) / (right - left)
        return seconds * (config.d_head + config.d_value) / (2 * D_HEAD)  # type: ignore[union-attr]


@lru_cache(maxsize=64)
def fit_reference_model(steps: tuple[ReferenceStep, ...]) -> ReferenceModel:
    """Compute the parameters of a backend from all reference steps of one family and mode."""
    return ReferenceModel(steps)


class ReferenceLaunches:
    """The launch overhead of a GPU backend for one model family and mode, computed from its reference steps.

    The steps of all sizes launch the same kernels, so they are repeated measurements of one overhead. Other processes
    slow the CPU down for seconds at a time, and the largest steps take longer than their launches. Therefore, the lower
    quartile is used.
    """

    def __init__(self, steps: Iterable[ReferenceStep]) -> None:
        parts = [_GroupParts(group) for group in _group_by_size(steps) if _has_several_depths(group)]
        self._per_layer = _lower_quartile([group.layer for group in parts])
        encoder_layers = [group.encoder_layer for group in parts if group.encoder_layer is not None]
        self._per_encoder_layer = _lower_quartile(encoder_layers) if encoder_layers else 0.0
        base: dict[tuple[int, ...], list[float]] = {}
        for group in parts:
            tokens, source_tokens = group.tokens
            base.setdefault((source_tokens or tokens,), []).append(group.base)
        self._base = _table({n_tokens: _lower_quartile(seconds) for n_tokens, seconds in base.items()})

    def base_seconds(self, config: ModelConfig, workload: Workload) -> float:
        """Return the time outside the layers, which grows with the tokens that the engine copies to the GPU."""
        tokens, source_tokens = _n_tokens(config, workload)
        return self._base.interpolate_linearly(source_tokens or tokens)

    def layer_seconds(self, config: ModelConfig, workload: Workload) -> float:
        """Return the time to launch the kernels of all layers."""
        if not isinstance(config, Seq2SeqConfig):
            return config.n_layers * self._per_layer  # type: ignore[union-attr]
        n_encoder_layers = 0 if workload.mode is Mode.DECODE else config.n_encoder_layers
        return n_encoder_layers * self._per_encoder_layer + config.n_decoder_layers * self._per_layer


@lru_cache(maxsize=64)
def fit_reference_launches(steps: tuple[ReferenceStep, ...]) -> ReferenceLaunches:
    """Compute the launch overhead of a backend from all reference steps of one family and mode."""
    return ReferenceLaunches(steps)


def _group_by_size(steps: Iterable[ReferenceStep]) -> list[list[ReferenceStep]]:
    """Return groups of steps that have the same width and sizes but different numbers of layers or vocabularies."""
    groups: dict[tuple[int, ...], list[ReferenceStep]] = {}
    for step in steps:
        groups.setdefault((step.d_model, step.batch_size, step.seq_len, step.source_len or 0), []).append(step)
    return [group for _, group in sorted(groups.items())]


def _has_several_depths(group: list[ReferenceStep]) -> bool:
    """Return False if the deeper model was too large for the memory."""
    return len({step.n_layers for step in group}) > 1


def _lower_quartile(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=4, method="inclusive")[0] if len(seconds) > 1 else seconds[0]


class _GroupParts:
    """The parts of a step, from steps that have the same width and sizes but different numbers of layers."""

    def __init__(self, group: list[ReferenceStep]) -> None:
        first = min(group, key=lambda step: (step.n_layers + step.n_encoder_layers, step.vocab_size))
        config, workload = first.config(), first.workload(Precision.FLOAT32)
        self.tokens = _n_tokens(config, workload)
        self.encoder_layer_weights, self.layer_weights = _weights_per_layer(config, workload)
        deeper = next(step for step in group if step.n_layers > first.n_layers)
        self.layer = _seconds_per_layer(first, deeper)
        deeper_encoder = next((step for step in group if step.n_encoder_layers > first.n_encoder_layers), None)
        self.encoder_layer = None if deeper_encoder is None else _seconds_per_layer(first, deeper_encoder)
        wider = next((step for step in group if step.vocab_size > first.vocab_size), None)
        self.logits = None if wider is None else max(MIN_SECONDS, wider.seconds - first.seconds)
        largest = wider or first
        self.logit_rows, self.logit_weights = _logit_rows_and_weights(largest.config(), workload)
        layers = first.n_layers * self.layer + first.n_encoder_layers * (self.encoder_layer or 0.0)
        self.base = max(MIN_SECONDS, first.seconds - layers)


def _seconds_per_layer(few: ReferenceStep, many: ReferenceStep) -> float:
    """Return the time of a layer, from two models that differ in the number of layers of one stack.

    The weights of the smaller model may stay in a hardware cache. The difference then includes the time to read its
    first layer, so the result is limited to the mean time per layer of the larger model.
    """
    is_encoder = many.n_encoder_layers > few.n_encoder_layers
    n_few, n_many = ((step.n_encoder_layers if is_encoder else step.n_layers) for step in (few, many))
    difference = (many.seconds - few.seconds) / (n_many - n_few)
    return max(MIN_SECONDS, min(difference, many.seconds / n_many))


def _table(points: Mapping[tuple[int, ...], float]) -> TimingTable:
    """Build a table whose axes contain all sizes of the points. Missing combinations are extrapolated."""
    axes = tuple(tuple(sorted({point[i] for point in points})) for i in range(len(next(iter(points)))))
    return TimingTableBuilder(axes=axes, measured={**points}).build()


def _n_tokens(config: ModelConfig, workload: Workload) -> tuple[int, int]:
    """Return the numbers of positions that the (decoder) layers and the encoder layers process."""
    has_encoder = isinstance(config, Seq2SeqConfig) and workload.mode is not Mode.DECODE
    return workload.n_tokens, workload.batch_size * workload.n_source if has_encoder else 0


def _weights_per_layer(config: ModelConfig, workload: Workload) -> tuple[int, int]:
    """Return the number of matmul weights that one encoder layer and one (decoder) layer read."""
    weights = {True: 0, False: 0}
    for op in list_operations(config, workload.replace(batch_size=1)):
        if op.is_block and op.matmul is not None and op.parameters:
            weights[op.part.startswith("encoder.")] += op.weights
    return weights[True], weights[False]


def _logit_rows_and_weights(config: ModelConfig, workload: Workload) -> tuple[int, int]:
    """Return the number of rows of the logits and the number of their weights, or zeros if the step computes none.

    The weights of the reference vocabulary are not counted because the base includes them.
    """
    if isinstance(config, BERTConfig) and not (workload.mode is Mode.TRAIN and config.masked_lm_head):
        return 0, 0
    n_rows = workload.n_logit_rows
    if workload.mode is Mode.PREFILL and workload.logits_to_keep is None:
        n_rows = workload.batch_size  # engines compute only the logits of the last token
    return n_rows, max(0, config.vocab_size - REFERENCE_VOCAB_SIZE) * config.d_model
