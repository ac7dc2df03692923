"""Measure the reference steps that calibrate the fast backend of a device."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from qkv.choices import BackendName
from qkv.cost.backends import is_captured, select_backend
from qkv.cost.calibration import REFERENCE_LENGTH, REFERENCE_VOCAB_SIZE, ReferenceStep
from qkv.cost.workload import Mode, Precision
from qkv.training.benchmark_steps import build_random_model, measure_backend_step
from qkv.training.timer import Timer

FEW_LAYERS = 1
ROUNDS = {"cpu": 2, "cuda": 1}
"""Number of measurements of each step. Other processes may slow down a CPU for seconds."""


@dataclass(frozen=True, kw_only=True)
class ReferenceGrid:
    """The sizes of the reference models and steps of a device."""

    many_layers: dict[int, int]
    """The widths of the models, and the number of layers of the deeper model of each width."""
    large_vocabulary: int
    decode_batches: tuple[int, ...]
    n_tokens: tuple[int, ...]
    """Numbers of tokens in a pass over full sequences. A CPU encodes at most 512 tokens at a time."""
    long_contexts: tuple[int, ...]
    """Numbers of cached keys for measuring the attention of a decode step."""
    long_context_batches: tuple[int, ...]
    long_context_width: int
    max_flops: float
    """Steps with more FLOPs are not measured but extrapolated from smaller ones."""


CPU = ReferenceGrid(
    many_layers={64: 5, 128: 5, 256: 5, 512: 3, 768: 3},
    large_vocabulary=8192,
    decode_batches=(1, 2, 4, 16),
    n_tokens=(16, 64, 256, 1024),
    long_contexts=(256, 1024),
    long_context_batches=(1, 8),
    long_context_width=256,
    max_flops=3.5e10,
)
# The deeper models of medium width do not fit into the cache of a GPU. In practice, such models have as many layers.
GPU = ReferenceGrid(
    many_layers={128: 9, 512: 9, 1024: 9, 2048: 4},
    large_vocabulary=32768,
    decode_batches=(1, 8, 32, 128),
    n_tokens=(64, 512, 2048, 16384),
    long_contexts=(1024, 4096),
    long_context_batches=(1, 8, 64),
    long_context_width=512,
    max_flops=6e13,
)


def measure_reference_steps(
    timer: Timer,
    dtype: Precision,
    report: Callable[[str], None] = lambda _line: None,
    *,
    grid: ReferenceGrid | None = None,
) -> dict[BackendName, tuple[ReferenceStep, ...]]:
    """Measure all reference steps that the fast backend of the device supports, in rounds that keep the fastest time.

    A step that fails, for example because it is too large for the memory, is left out.
    """
    backend = BackendName.CUDA if timer.is_gpu else BackendName.CPU
    steps = {
        step: _select_backend(step, timer, dtype)
        for step in reference_steps(grid or (GPU if timer.is_gpu else CPU))
        if not timer.is_gpu or _is_used_on_gpu(step, dtype)
    }
    # The smallest models of a family may run on the eager backend although the larger ones do not.
    supported = {(step.family, step.mode) for step, selected in steps.items() if selected == backend}
    fastest: dict[ReferenceStep, float] = {}
    started = time.perf_counter()
    for round_number in range(ROUNDS[timer.device.type]):
        for step, selected in steps.items():
            if (step.family, step.mode) not in supported:
                continue
            try:
                seconds = _measure(timer, step, dtype, selected)
            except Exception as error:  # noqa: BLE001 - sizes that cannot be measured are extrapolated from others
                report(f"not measured: {step!r}: {type(error).__name__}: {error}")
                continue
            fastest[step] = min(seconds, fastest.get(step, seconds))
        report(f"{time.perf_counter() - started:.0f} s: steps of the {backend} backend, round {round_number + 1}")
    return {backend: tuple(step.replace(seconds=seconds) for step, seconds in fastest.items())}


def _select_backend(step: ReferenceStep, timer: Timer, dtype: Precision) -> str:
    return select_backend(step.config(), step.workload(dtype), timer.device.type)


def _is_used_on_gpu(step: ReferenceStep, dtype: Precision) -> bool:
    """Return False for models that measure the logits of a step outside a CUDA graph, which is predicted by kernel."""
    is_reference_vocabulary = step.vocab_size == REFERENCE_VOCAB_SIZE
    return is_reference_vocabulary or is_captured(step.config(), step.workload(dtype), BackendName.CUDA)


def reference_steps(grid: ReferenceGrid) -> Iterator[ReferenceStep]:
    """Yield all steps of a grid. Their time is not set."""
    for d_model, many_layers in grid.many_layers.items():
        for batch in grid.decode_batches:
            size = {"mode": Mode.DECODE, "batch_size": batch, "seq_len": REFERENCE_LENGTH, "d_model": d_model}
            yield from _variants("gpt", grid, many_layers, **size)
            yield from _variants("seq2seq", grid, many_layers, **size, source_len=REFERENCE_LENGTH)
        for n_tokens in grid.n_tokens:
            length = min(n_tokens, REFERENCE_LENGTH)
            for family, mode in (
                ("gpt", Mode.PREFILL),
                ("gpt", Mode.FORWARD),
                ("gpt", Mode.TRAIN),
                ("bert", Mode.FORWARD),
                ("bert", Mode.TRAIN),
                ("seq2seq", Mode.PREFILL),
                ("seq2seq", Mode.TRAIN),
            ):
                if 72 * d_model**2 * many_layers * n_tokens > grid.max_flops:
                    continue
                # A translation starts with a single target token.
                is_translation = family == "seq2seq" and mode is Mode.PREFILL
                yield from _variants(
                    family,
                    grid,
                    many_layers,
                    mode=mode,
                    batch_size=n_tokens // length,
                    seq_len=1 if is_translation else length,
                    d_model=d_model,
                    source_len=length if family == "seq2seq" else None,
                )
    width = grid.long_context_width
    for n_keys in grid.long_contexts:
        for batch in grid.long_context_batches:
            for n_layers in (FEW_LAYERS, grid.many_layers[width]):
                yield _unmeasured("gpt", Mode.DECODE, batch, n_keys, width, n_layers)


def _variants(
    family: str,
    grid: ReferenceGrid,
    many_layers: int,
    *,
    mode: Mode,
    batch_size: int,
    seq_len: int,
    d_model: int,
    source_len: int | None = None,
) -> Iterator[ReferenceStep]:
    """Yield steps of models that differ in the number of layers of one stack or in the vocabulary size."""
    has_encoder = family == "seq2seq"
    first = ReferenceStep(
        family=family,  # type: ignore[arg-type]
        mode=mode,
        batch_size=batch_size,
        seq_len=seq_len,
        source_len=source_len,
        d_model=d_model,
        n_layers=FEW_LAYERS,
        n_encoder_layers=FEW_LAYERS if has_encoder else 0,
        vocab_size=REFERENCE_VOCAB_SIZE,
        seconds=1.0,
    )
    yield first
    yield first.replace(n_layers=many_layers)
    if has_encoder and mode is not Mode.DECODE:
        yield first.replace(n_encoder_layers=many_layers)
    if not (family == "bert" and mode is Mode.FORWARD):
        yield first.replace(vocab_size=grid.large_vocabulary)


def _unmeasured(family: str, mode: Mode, batch: int, seq_len: int, d_model: int, n_layers: int) -> ReferenceStep:
    return ReferenceStep(
        family=family,  # type: ignore[arg-type]
        mode=mode,
        batch_size=batch,
        seq_len=seq_len,
        d_model=d_model,
        n_layers=n_layers,
        vocab_size=REFERENCE_VOCAB_SIZE,
        seconds=1.0,
    )


def _measure(timer: Timer, step: ReferenceStep, dtype: Precision, backend: str) -> float:
    workload = step.workload(dtype)
    model = build_random_model(step.config(), timer.device, workload.dtype)
    try:
        return measure_backend_step(model, workload, backend, timer, seconds=timer.seconds_per_measurement)
    finally:
        del model
        if timer.is_gpu:
            torch.cuda.empty_cache()  # otherwise, the memory of captured graphs is not reused
