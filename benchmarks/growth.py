"""How time and memory grow with length, batch and layers: measured, beside what `cost` says."""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from benchmarks import machine
from benchmarks.memory import MIB, most_on_cpu
from benchmarks.recurrence import png
from benchmarks.results import Report
from benchmarks.runner import Asked, Say
from qkv.choices import PositionKind
from qkv.config import GPTConfig
from qkv.cost import Mode, Precision, Workload
from qkv.cost.calibration import Calibration, fitting_calibration
from qkv.cost.estimate import estimate_of
from qkv.cost.prediction import predict
from qkv.cost.workload import Backend
from qkv.inspection.figures import new_figure
from qkv.training.calibrating import CPU, GPU, calibrate, device_name
from qkv.training.measuring import Step, random_model, step_of
from qkv.training.stopwatch import Stopwatch, keep_freed_memory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LENGTH, BATCH, LAYERS = "n, tokens", "batch, rows", "layers"
MODES = {Mode.TRAIN: "training step", Mode.PREFILL: "prompt read", Mode.DECODE: "one more token"}
COLOURS = {Mode.TRAIN: "#D55E00", Mode.PREFILL: "#0072B2", Mode.DECODE: "#009E73"}
SPEND = 0.1
"""Seconds for each measurement, and three runs at least."""
FEW_RECURRENCES = ((2, 8), (1, 16), (32, 128))
"""A calibration must have some; no model here has any."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One model's shape, and what is varied of it while the rest stays."""

    d_model: int
    n_layers: int
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    layers: tuple[int, ...]
    usual: tuple[int, int]
    """Rows and tokens while layers vary; of these the tokens while rows do."""
    vocabulary: int = 1024

    def config(self, n_layers: int) -> GPTConfig:
        return GPTConfig(
            vocab_size=self.vocabulary, context_length=max(self.lengths), d_model=self.d_model,
            n_heads=self.d_model // 64, n_layers=n_layers, positions=PositionKind.ROTARY,
        )  # fmt: skip

    def points(self) -> Iterator[tuple[str, int, GPTConfig, tuple[int, int]]]:
        """What is varied, to what; the shape, rows and tokens."""
        rows, tokens = self.usual
        yield from ((LENGTH, n, self.config(self.n_layers), (1, n)) for n in self.lengths)
        yield from ((BATCH, n, self.config(self.n_layers), (n, tokens)) for n in self.batches)
        yield from ((LAYERS, n, self.config(n), (rows, tokens)) for n in self.layers)


PLANS = {
    "cpu": Plan(
        d_model=128, n_layers=2, lengths=(256, 512, 1024, 2048, 4096, 8192), batches=(1, 2, 4, 8, 16, 32),
        layers=(1, 2, 4, 8, 16), usual=(2, 256),
    ),
    "cuda": Plan(
        d_model=768, n_layers=4, lengths=(1024, 2048, 4096, 8192, 16384, 32768, 65536), vocabulary=4096,
        batches=(1, 2, 4, 8, 16, 32, 64), layers=(1, 2, 4, 8, 16, 32), usual=(8, 1024),
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Point:
    """One kind of work at one size."""

    varied: str
    value: int
    mode: Mode
    seconds: float
    predicted: float
    n_bytes: int
    expected: int

    @property
    def cells(self) -> list[str]:
        times = [f"{1000 * one:,.2f}" for one in (self.seconds, self.predicted)]
        sizes = [f"{one / MIB:,.1f}" for one in (self.n_bytes, self.expected)]
        errors = [f"{one - 1:+.0%}" for one in (self.predicted / self.seconds, self.expected / self.n_bytes)]
        return [f"{self.varied.split(',')[0]} {self.value:,}", MODES[self.mode], *times, errors[0], *sizes, errors[1]]


def growth(asked: Asked) -> Report:
    """Each size once, from small to large; nothing is fitted to these points."""
    load, device = machine.others_load(), torch.device(asked.device)
    torch.set_num_threads(asked.threads or (1 if device.type == "cpu" else torch.get_num_threads()))
    keep_freed_memory()
    plan, calibration = PLANS[device.type], _calibration(device, asked.say)
    points = list(_measured(plan, calibration, device, asked.say))
    where = device_name(device)
    numbers = "bfloat16, mixed in training" if device.type == "cuda" else "float32"
    return Report(
        name=f"growth, {device.type}",
        what=(
            f"Time and memory of a GPT of width {plan.d_model} with rotary positions, {plan.vocabulary:,} words, "
            f"on {where}, {numbers}; torch's eager road. By n: 1 row, {plan.n_layers} layers; by batch: "
            f"{plan.usual[1]:,} tokens a row; by layers: {plan.usual[0]} rows of {plan.usual[1]:,}. A training step is "
            "whole, with its update; one more token has a cache of the rest."
        ),
        columns=["size", "work", "ms", "calibrated ms", "error", "MiB", "by cost MiB", "error"],
        rows=[point.cells for point in points],
        notes=[*_growth(points), _errors(points), f"Drawn: `docs/pictures/growth-{device.type}.png`."],
        versions={"torch": torch.__version__},
        load=load,
        pictures={f"growth-{device.type}.png": drawn(points, f"How a GPT's cost grows, {where}")},
    )


def _calibration(device: torch.device, say: Say) -> Calibration:
    """The one that `qkv cost calibrate` kept for this device, else a new one."""
    dtype = Precision.BFLOAT16 if device.type == "cuda" else Precision.FLOAT32
    known = fitting_calibration(Mode.PREFILL, dtype, device=device_name(device))
    if known is not None:
        return known
    grid = replace(GPU if device.type == "cuda" else CPU, recurrence=FEW_RECURRENCES)
    return calibrate(device, dtype, say, grid=grid)


def _measured(plan: Plan, calibration: Calibration, device: torch.device, say: Say) -> Iterator[Point]:
    watch = Stopwatch(device)
    for varied, value, config, (rows, tokens) in plan.points():
        for mode in MODES:
            dtype = calibration.training_dtype if mode is Mode.TRAIN else calibration.dtype
            work = Workload(batch=rows, length=tokens, mode=mode, dtype=dtype, backend=Backend(device.type))
            try:
                n_bytes = _held(lambda work=work, config=config: _made(config, work, device), device)
                seconds = watch.whole(_made(config, work, device), spend=SPEND)
            except torch.OutOfMemoryError as error:
                say(f"left out: {varied} {value}, {mode.value}: {str(error).splitlines()[0]}")
                continue
            predicted = predict(config, work, calibration).seconds
            expected = estimate_of(config, work).memory.peak
            point = Point(
                varied=varied, value=value, mode=mode, seconds=seconds, predicted=predicted, n_bytes=n_bytes,
                expected=expected,
            )  # fmt: skip
            say("  ".join(point.cells))
            yield point


def _made(config: GPTConfig, work: Workload, device: torch.device) -> Step:
    return step_of(random_model(config, device, work.dtype), work)


def _held(make: Callable[[], Step], device: torch.device) -> int:
    """The most bytes at any time from the model's making to the end of its second step."""

    def twice() -> None:
        step = make()
        for _ in range(2):
            step()

    gc.collect()
    if device.type == "cpu":
        return most_on_cpu(twice)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    twice()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _growth(points: Sequence[Point]) -> list[str]:
    said = []
    for varied in (LENGTH, BATCH, LAYERS):
        told = []
        values = sorted({one.value for one in points if one.varied == varied})[-2:]
        for mode, name in MODES.items():
            *_, first, last = (one for one in points if one.varied == varied and one.mode is mode)
            time, theory = last.seconds / first.seconds, last.predicted / first.predicted
            held, meant = last.n_bytes / first.n_bytes, last.expected / first.expected
            told.append(f"{name} {time:.2f} times the time ({theory:.2f}), {held:.2f} times the bytes ({meant:.2f})")
        sizes = f"{varied.split(',')[0]} from {values[0]:,} to {values[1]:,}"
        said.append(f"{sizes}, in brackets by `cost`: {'; '.join(told)}.")
    return said


def _errors(points: Sequence[Point]) -> str:
    times = [abs(one.predicted / one.seconds - 1) for one in points]
    sizes = {
        name: [abs(one.expected / one.n_bytes - 1) for one in points if (one.mode is Mode.TRAIN) == is_training]
        for name, is_training in (("training", True), ("inference", False))
    }
    told = ", ".join(f"of {name} {sum(some) / len(some):.1%}" for name, some in sizes.items())
    return f"Mean error of {len(times)} times: {sum(times) / len(times):.0%}; of bytes: {told}."


def drawn(points: Sequence[Point], title: str) -> bytes:
    """A row for what is varied; time on the left, memory on the right."""
    figure = new_figure(width=10.0, height=11.0)
    for axes, varied in zip(figure.subplots(3, 2), (LENGTH, BATCH, LAYERS), strict=True):
        own = [one for one in points if one.varied == varied]
        sides = (
            ("milliseconds", lambda one: 1000 * one.seconds, lambda one: 1000 * one.predicted),
            ("MiB held at most", lambda one: one.n_bytes / MIB, lambda one: one.expected / MIB),
        )
        for axis, (label, measured, theory) in zip(axes, sides, strict=True):
            for mode, name in MODES.items():
                some = [one for one in own if one.mode is mode]
                sizes = [one.value for one in some]
                axis.plot(sizes, [theory(one) for one in some], color=COLOURS[mode], linewidth=1.2)
                axis.plot(sizes, [measured(one) for one in some], "o", color=COLOURS[mode], markersize=4.5, label=name)
            _finish(axis, varied, label, sorted({one.value for one in own}))
    figure.suptitle(f"{title}\ndots: measured; lines: predicted by cost (calibrated time, bytes from the config)")
    return png(figure)


def _finish(axis: "Axes", x: str, y: str, values: list[int]) -> None:
    from matplotlib.ticker import StrMethodFormatter

    axis.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
    axis.set_xticks(values, [f"{value:,}" for value in values])
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    axis.minorticks_off()
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize="small")
