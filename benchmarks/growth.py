"""Benchmark how time and memory grow with length, batch size and layers, and compare them with `qkv.cost` estimates."""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from benchmarks import machine
from benchmarks.memory import MIB, peak_cpu_bytes
from benchmarks.recurrence import encode_png
from benchmarks.results import Report
from benchmarks.runner import BenchmarkOptions, LogFunction
from qkv.choices import BackendName, PositionKind
from qkv.cli.process import retain_freed_memory
from qkv.config import GPTConfig
from qkv.cost import Mode, Precision, Workload
from qkv.cost.calibration import Calibration, find_newest_calibration
from qkv.cost.estimate import estimate_workload
from qkv.cost.prediction import predict_time
from qkv.cost.workload import DeviceType
from qkv.inspection.figures import new_figure
from qkv.training.benchmark_steps import Step, build_random_model, configure_model_and_build_step
from qkv.training.device_calibration import CPU, GPU, calibrate
from qkv.training.timer import Timer
from qkv.utils import gpu_name_or_cpu_threads

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LENGTH, BATCH, LAYERS = "n, tokens", "batch size, sequences", "layers"
MODES = {Mode.TRAIN: "training step", Mode.PREFILL: "prefill", Mode.DECODE: "decode step"}
COLORS = {Mode.TRAIN: "#D55E00", Mode.PREFILL: "#0072B2", Mode.DECODE: "#009E73"}
SECONDS_PER_MEASUREMENT = 0.1
"""Duration of each measurement in seconds. Each measurement includes at least three runs."""
FEW_RECURRENCES = ((2, 8), (1, 16), (32, 128))
"""Grid of recurrences, which a calibration requires although these models do not use recurrences."""


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """The shape of a model and the values of the quantities that are varied one at a time."""

    d_model: int
    n_layers: int
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    layers: tuple[int, ...]
    fixed_size: tuple[int, int]
    """Batch size and number of tokens used while the number of layers varies. While the batch size varies, only the
    number of tokens is fixed."""
    vocab_size: int = 1024

    def config(self, n_layers: int) -> GPTConfig:
        return GPTConfig(
            vocab_size=self.vocab_size,
            context_length=max(self.lengths),
            d_model=self.d_model,
            n_heads=self.d_model // 64,
            n_layers=n_layers,
            positions=PositionKind.ROTARY,
        )

    def points(self) -> Iterator[tuple[str, int, GPTConfig, tuple[int, int]]]:
        """Yield the varied quantity, its value, the model config, and the batch size and number of tokens."""
        rows, tokens = self.fixed_size
        yield from ((LENGTH, n, self.config(self.n_layers), (1, n)) for n in self.lengths)
        yield from ((BATCH, n, self.config(self.n_layers), (n, tokens)) for n in self.batches)
        yield from ((LAYERS, n, self.config(n), (rows, tokens)) for n in self.layers)


SWEEPS = {
    "cpu": SweepPlan(
        d_model=128,
        n_layers=2,
        lengths=(256, 512, 1024, 2048, 4096, 8192),
        batches=(1, 2, 4, 8, 16, 32),
        layers=(1, 2, 4, 8, 16),
        fixed_size=(2, 256),
    ),
    "cuda": SweepPlan(
        d_model=768,
        n_layers=4,
        lengths=(1024, 2048, 4096, 8192, 16384, 32768, 65536),
        vocab_size=4096,
        batches=(1, 2, 4, 8, 16, 32, 64),
        layers=(1, 2, 4, 8, 16, 32),
        fixed_size=(8, 1024),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Point:
    """The measured and predicted time and memory of one mode at one size."""

    varied: str
    value: int
    mode: Mode
    seconds: float
    predicted: float
    n_bytes: int
    expected: int

    @property
    def cells(self) -> list[str]:
        times = [f"{1000 * point:,.2f}" for point in (self.seconds, self.predicted)]
        sizes = [f"{point / MIB:,.1f}" for point in (self.n_bytes, self.expected)]
        errors = [f"{point - 1:+.0%}" for point in (self.predicted / self.seconds, self.expected / self.n_bytes)]
        return [f"{self.varied.split(',')[0]} {self.value:,}", MODES[self.mode], *times, errors[0], *sizes, errors[1]]


def growth(options: BenchmarkOptions) -> Report:
    """Measure every size once, from small to large. Nothing is fitted to the measured points."""
    load, device = machine.load_average(), torch.device(options.device)
    torch.set_num_threads(options.threads or (1 if device.type == "cpu" else torch.get_num_threads()))
    retain_freed_memory()
    plan, calibration = SWEEPS[device.type], _find_or_create_calibration(device, options.log)
    points = list(_measure_points(plan, calibration, device, options.log))
    device_title = gpu_name_or_cpu_threads(device)
    numbers = "bfloat16 (mixed precision in training)" if device.type == "cuda" else "float32"
    return Report(
        name=f"growth, {device.type}",
        description=(
            f"Time and memory of a GPT with d_model={plan.d_model}, rotary positions and "
            f"vocab_size={plan.vocab_size:,}, with eager PyTorch in {numbers} on {device_title}. When n varies, the "
            f"batch has 1 sequence, and the model has {plan.n_layers} layers. When the batch size varies, each "
            f"sequence has {plan.fixed_size[1]:,} tokens, and the model has {plan.n_layers} layers. When the number of "
            f"layers varies, the batch has {plan.fixed_size[0]} sequences of {plan.fixed_size[1]:,} tokens. A training "
            "step includes the update. In a decode step, all other tokens are in the cache."
        ),
        columns=["size", "mode", "ms", "predicted ms", "error", "MiB", "predicted MiB", "error"],
        rows=[point.cells for point in points],
        notes=[
            *_describe_growth(points),
            _describe_errors(points),
            f"Plot: `docs/pictures/growth-{device.type}.png`.",
        ],
        versions={"torch": torch.__version__},
        load=load,
        plots={f"growth-{device.type}.png": plot_points(points, f"Growth of the cost of a GPT, {device_title}")},
    )


def _find_or_create_calibration(device: torch.device, log: LogFunction) -> Calibration:
    """Return the saved calibration of this device, or calibrate the device."""
    dtype = Precision.BFLOAT16 if device.type == "cuda" else Precision.FLOAT32
    calibration = find_newest_calibration(Mode.PREFILL, dtype, device=gpu_name_or_cpu_threads(device))
    if calibration is not None:
        return calibration
    grid = replace(GPU if device.type == "cuda" else CPU, recurrence_axes=FEW_RECURRENCES)
    return calibrate(device, dtype, log, grid=grid, with_fast_backend=False)


def _measure_points(
    plan: SweepPlan, calibration: Calibration, device: torch.device, log: LogFunction
) -> Iterator[Point]:
    timer = Timer(device)
    for varied, value, config, (rows, tokens) in plan.points():
        for mode in MODES:
            dtype = calibration.training_dtype if mode is Mode.TRAIN else calibration.dtype
            workload = Workload(
                batch_size=rows, seq_len=tokens, mode=mode, dtype=dtype, device_type=DeviceType(device.type)
            )
            try:
                n_bytes = _peak_bytes(
                    lambda workload=workload, config=config: _build_model_step(config, workload, device), device
                )
                seconds = timer.measure_lower_quartile_latency(
                    _build_model_step(config, workload, device), seconds=SECONDS_PER_MEASUREMENT
                )
            except torch.OutOfMemoryError as error:
                log(f"skipped: {varied} {value}, {mode.value}: {str(error).splitlines()[0]}")
                continue
            predicted = predict_time(config, workload, calibration, backend=BackendName.EAGER).seconds
            expected = estimate_workload(config, workload).memory.peak
            point = Point(
                varied=varied,
                value=value,
                mode=mode,
                seconds=seconds,
                predicted=predicted,
                n_bytes=n_bytes,
                expected=expected,
            )
            log("  ".join(point.cells))
            yield point


def _build_model_step(config: GPTConfig, workload: Workload, device: torch.device) -> Step:
    return configure_model_and_build_step(build_random_model(config, device, workload.dtype), workload)


def _peak_bytes(make: Callable[[], Step], device: torch.device) -> int:
    """Return the peak memory in bytes from building the model to the end of its second step."""

    def build_and_run_twice() -> None:
        step = make()
        for _ in range(2):
            step()

    gc.collect()
    if device.type == "cpu":
        return peak_cpu_bytes(build_and_run_twice)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    build_and_run_twice()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _describe_growth(points: Sequence[Point]) -> list[str]:
    notes = []
    for varied, quantity in ((LENGTH, "n"), (BATCH, "the batch size"), (LAYERS, "the number of layers")):
        parts = []
        values = sorted({point.value for point in points if point.varied == varied})[-2:]
        for mode, name in MODES.items():
            *_, first, last = (point for point in points if point.varied == varied and point.mode is mode)
            time_ratio, predicted_ratio = last.seconds / first.seconds, last.predicted / first.predicted
            bytes_ratio, expected_bytes = last.n_bytes / first.n_bytes, last.expected / first.expected
            parts.append(
                f"{name} time × {time_ratio:.2f} ({predicted_ratio:.2f}), "
                f"memory × {bytes_ratio:.2f} ({expected_bytes:.2f})"
            )
        notes.append(
            f"Growth when {quantity} increases from {values[0]:,} to {values[1]:,} (predictions in parentheses): "
            f"{'; '.join(parts)}."
        )
    return notes


def _describe_errors(points: Sequence[Point]) -> str:
    times = [abs(point.predicted / point.seconds - 1) for point in points]
    sizes = {
        name: [abs(point.expected / point.n_bytes - 1) for point in points if (point.mode is Mode.TRAIN) == is_training]
        for name, is_training in (("training", True), ("inference", False))
    }
    parts = ", ".join(f"{sum(mode_points) / len(mode_points):.1%} in {name}" for name, mode_points in sizes.items())
    return f"Mean error of the {len(times)} predicted times: {sum(times) / len(times):.0%}. Mean memory error: {parts}."


def plot_points(points: Sequence[Point], title: str) -> bytes:
    """Plot time and memory and return a PNG file.

    The plot has one row per varied quantity, with time on the left and memory on the right.
    """
    figure = new_figure(width=10.0, height=11.0)
    for axes, varied in zip(figure.subplots(3, 2), (LENGTH, BATCH, LAYERS), strict=True):
        varied_points = [point for point in points if point.varied == varied]
        sides = (
            ("milliseconds", lambda point: 1000 * point.seconds, lambda point: 1000 * point.predicted),
            ("peak MiB", lambda point: point.n_bytes / MIB, lambda point: point.expected / MIB),
        )
        for axis, (label, measured, theory) in zip(axes, sides, strict=True):
            for mode, name in MODES.items():
                mode_points = [point for point in varied_points if point.mode is mode]
                sizes = [point.value for point in mode_points]
                axis.plot(sizes, [theory(point) for point in mode_points], color=COLORS[mode], linewidth=1.2)
                axis.plot(
                    sizes,
                    [measured(point) for point in mode_points],
                    "o",
                    color=COLORS[mode],
                    markersize=4.5,
                    label=name,
                )
            _format_axis(axis, varied, label, sorted({point.value for point in varied_points}))
    figure.suptitle(f"{title}\ndots: measured; lines: predicted (calibrated time, memory computed from the config)")
    return encode_png(figure)


def _format_axis(axis: "Axes", x: str, y: str, values: list[int]) -> None:
    from matplotlib.ticker import StrMethodFormatter

    axis.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
    axis.set_xticks(values, [f"{value:,}" for value in values])
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    axis.minorticks_off()
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize="small")
