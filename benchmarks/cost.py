"""Compare predicted and measured times for models and sizes that the calibration did not use."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import machine
from benchmarks.cost_cases import build_configs, workload_sizes
from benchmarks.gpu_kernel_profile import profile_kernels
from benchmarks.results import Report
from benchmarks.runner import BenchmarkOptions, LogFunction
from qkv.choices import AttentionKernel
from qkv.config import GPTConfig, ModelConfig
from qkv.cost import Mode, Precision, Workload, list_operations
from qkv.cost.calibration import Calibration
from qkv.cost.prediction import TimePrediction, predict_time
from qkv.training.benchmark_steps import Step, build_random_model, configure_model_and_build_step
from qkv.training.device_calibration import calibrate
from qkv.training.launch_overhead import build_tiny_forward_pass
from qkv.training.timer import Timer, retain_freed_memory

LONG_CONTEXTS = (1024, 2048, 4096)
ROUNDS = {"cpu": 3, "cuda": 8}
"""Number of rounds over all points. The smallest time of each point counts because a shared machine can be slow for
seconds."""
SECONDS_PER_MEASUREMENT = {"cpu": 0.25, "cuda": 0.1}
"""Duration of each measurement in seconds."""
GPU_SECONDS, STUDY_SECONDS = 90, 5
"""Time limits on a GPU. Rounds stop after `GPU_SECONDS`, and then kernels are profiled for `STUDY_SECONDS`."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """The predicted and measured times of one model at one size."""

    model: str
    config: ModelConfig
    workload: Workload
    prediction: TimePrediction
    measured: float
    largest_tensor: tuple[int, int] | None = None
    """Predicted and actual size of the largest tensor in bytes, which is measured only for long contexts."""

    @property
    def predicted(self) -> float:
        return self.prediction.seconds

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def cells(self) -> list[str]:
        workload = self.workload
        source = "" if workload.source_len is None else f" from {workload.source_len}"
        times = [f"{1000 * seconds:.3f}" for seconds in (self.predicted, self.measured)]
        name = self.model if workload.kernel.value == "fused" else f"{self.model}, eager"
        return [
            name,
            workload.mode.value,
            f"{workload.batch_size}×{workload.seq_len}{source}",
            *times,
            f"{self.error:+.0%}",
            self.prediction.bound_by,
        ]

    def as_dict(self) -> dict[str, Any]:
        parts = [[item.part, item.name, item.runs, 1000 * item.seconds] for item in self.prediction.operation_times]
        sums = {
            f"predicted_{name.removesuffix('_seconds')}_ms": 1000 * seconds
            for name, seconds in self.prediction.as_dict().items()
        }
        return {
            "model": self.model,
            "mode": self.workload.mode.value,
            "batch_size": self.workload.batch_size,
            "seq_len": self.workload.seq_len,
            "measured_ms": 1000 * self.measured,
            **sums,
            "error": self.error,
            "bound_by": self.prediction.bound_by,
            "parts": parts,
            "config": self.config.model_dump(mode="json"),
            "workload": self.workload.model_dump(mode="json"),
        }


def cost(options: BenchmarkOptions) -> Report:
    """Calibrate the device, and compare predicted and measured times. Nothing is fitted to the measured points."""
    started, load, device = time.perf_counter(), machine.load_average(), torch.device(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    retain_freed_memory()
    dtype = Precision.BFLOAT16 if device.type == "cuda" else Precision.FLOAT32
    calibration = calibrate(device, dtype, options.log)
    options.log(f"calibrated {calibration.device} in {calibration.duration:.0f} s")
    until = started + GPU_SECONDS if device.type == "cuda" else math.inf
    runner = _MeasurementRunner(calibration, device, options.log, until=until)
    result, long = runner.rounds()
    return Report(
        name=f"cost, {device.type}",
        description=(
            "Measured times compared with predictions from a calibration of this device. The calibration did not use "
            "any of these models and sizes."
        ),
        columns=["model", "mode", "batch × length", "predicted ms", "measured ms", "error", "bound by"],
        rows=[point.cells for point in [*result, *long]],
        notes=[*_notes(calibration, result, long), _describe_variation(runner.pass_seconds)],
        versions={"torch": torch.__version__},
        load=load,
        files={
            "cost-calibration.json": calibration.model_dump(mode="json"),
            "cost-points.json": {
                "summary": _summary(result),
                "pass_seconds": runner.pass_seconds,
                "points": runner.describe_points(result),
                "long_contexts": runner.describe_points(long),
            },
        },
    )


def _summary(points: Sequence[Point]) -> Mapping[str, float]:
    errors = [abs(point.error) for point in points]
    return {"points": len(errors), "mean_error": sum(errors) / len(errors), "worst_error": max(errors)}


def _notes(calibration: Calibration, result: list[Point], long: list[Point]) -> list[str]:
    worst = max(result, key=lambda point: abs(point.error))
    by_mode = []
    for mode in sorted({point.workload.mode for point in result}):
        errors = [abs(point.error) for point in result if point.workload.mode is mode]
        by_mode.append(f"{mode.value} {sum(errors) / len(errors):.0%}")
    notes = [
        f"Calibration: {calibration.device}, {calibration.dtype.value}, {calibration.duration:.0f} s.",
        f"Mean error of {len(result)} points: {_summary(result)['mean_error']:.1%}. Worst error: {worst.error:+.0%} ("
        + " ".join(worst.cells[:3])
        + "). Mean error by mode: "
        + ", ".join(by_mode)
        + ".",
    ]
    for point in long:
        assert point.largest_tensor is not None
        predicted, actual = point.largest_tensor
        notes.append(
            f"Context of {point.workload.seq_len} tokens with {point.workload.kernel.value} attention: "
            f"the largest tensor has {actual:,} bytes (predicted: {predicted:,}), and the forward pass takes "
            f"{1000 * point.measured:.1f} ms (predicted: {1000 * point.predicted:.1f} ms)."
        )
    return notes


def _describe_variation(pass_seconds: list[float]) -> str:
    fastest, median, slowest = (
        1000 * item for item in (min(pass_seconds), statistics.median(pass_seconds), max(pass_seconds))
    )
    return (
        "Variation of the machine: the same small forward pass, run before each measurement, took "
        f"{fastest:.2f} to {slowest:.2f} ms (median: {median:.2f} ms)."
    )


class _MeasurementRunner:
    """A runner that predicts and measures points on one device and keeps the smallest time over several rounds."""

    def __init__(self, calibration: Calibration, device: torch.device, log: LogFunction, *, until: float) -> None:
        """Create a runner that starts no round that would end after `until` (a value of `time.perf_counter`)."""
        self.calibration, self.device, self.log, self.until = calibration, device, log, until
        self.timer = Timer(device)
        self.pass_seconds: list[float] = []
        """Durations in seconds of the small forward pass that runs before each measurement. The pass is launch-bound,
        so its durations show how much the machine's speed varies."""
        self._tiny_pass = build_tiny_forward_pass(device, calibration.dtype)
        self._steps: dict[tuple[str, Workload], Step] = {}

    def rounds(self) -> tuple[list[Point], list[Point]]:
        """Measure all points and return the regular points and the long-context points."""
        points, long = self._list_points(), self._long_context_points()
        result: dict[int, Point] = {}
        round_seconds = 0.0
        n_rounds = ROUNDS[self.device.type]
        for round_number in range(n_rounds):
            round_start = time.perf_counter()
            if round_number and round_start + round_seconds > self.until:
                break
            self.log(f"round {round_number + 1} of {n_rounds}")
            for index, (name, config, workload) in enumerate([*points, *long]):
                try:
                    point = self._measure(name, config, workload)
                except RuntimeError as error:
                    # A model that is too large for the device must not prevent the other measurements.
                    self.log(f"Failed: {name} {workload.mode.value}: {str(error).splitlines()[0]}")
                    continue
                self.log("  ".join(point.cells))
                if index not in result or point.measured < result[index].measured:
                    result[index] = point
            round_seconds = time.perf_counter() - round_start
        short_points, long_points = (
            [point for index, point in result.items() if (index >= len(points)) == is_long] for is_long in (False, True)
        )
        return short_points, [replace(point, largest_tensor=self._largest_tensor(point)) for point in long_points]

    def _list_points(self) -> list[tuple[str, ModelConfig, Workload]]:
        configs, points = build_configs(self.device.type), []
        for name, mode, size in workload_sizes(self.device.type):
            dtype = self.calibration.training_dtype if mode == "train" else self.calibration.dtype
            points.append((name, configs[name], Workload(**size, mode=Mode(mode), dtype=dtype)))
        return points

    def _long_context_points(self) -> list[tuple[str, ModelConfig, Workload]]:
        """List the points for contexts of 1024, 2048 and 4096 tokens with eager and fused attention.

        Only eager attention allocates n×n matrices.
        """
        d_model = 768 if self.device.type == "cuda" else 128
        config = GPTConfig(vocab_size=512, context_length=4096, d_model=d_model, n_heads=d_model // 64, n_layers=2)
        workloads = [
            Workload(batch_size=1, seq_len=n, mode=Mode.FORWARD, dtype=self.calibration.dtype, kernel=kernel)
            for n in LONG_CONTEXTS
            for kernel in AttentionKernel
        ]
        return [(f"gpt {d_model}×2", config, workload) for workload in workloads]

    def _measure(self, name: str, config: ModelConfig, workload: Workload) -> Point:
        is_warm = (name, workload) in self._steps
        step = self._step(name, config, workload)
        self.pass_seconds.append(
            self.timer.measure_lower_quartile_latency(self._tiny_pass, is_warm=bool(self.pass_seconds))
        )
        measured = self.timer.measure_lower_quartile_latency(
            step, seconds=SECONDS_PER_MEASUREMENT[self.device.type], is_warm=is_warm
        )
        prediction = predict_time(config, workload, self.calibration)
        return Point(model=name, config=config, workload=workload, prediction=prediction, measured=measured)

    def _step(self, name: str, config: ModelConfig, workload: Workload) -> Step:
        if (name, workload) not in self._steps:
            self._steps[name, workload] = configure_model_and_build_step(
                build_random_model(config, self.device, workload.dtype), workload
            )
        return self._steps[name, workload]

    def describe_points(self, points: list[Point]) -> list[dict[str, Any]]:
        """Return all figures of each point. On a GPU, include the kernels of as many points as time permits."""
        described = []
        for point in points:
            described.append(point.as_dict())
            if self.device.type == "cuda" and time.perf_counter() < self.until + STUDY_SECONDS:
                try:
                    described[-1] |= profile_kernels(self._step(point.model, point.config, point.workload))
                except RuntimeError as error:
                    self.log(f"not profiled: {point.model}: {str(error).splitlines()[0]}")
        return described

    def _largest_tensor(self, point: Point) -> tuple[int, int]:
        """Return the predicted size and the actual size of the largest tensor in bytes."""
        with _LargestTensorMode() as actual:
            self._step(point.model, point.config, point.workload)()
        workload = point.workload
        is_fused = workload.kernel is AttentionKernel.FUSED
        largest = max(
            op.writes - (op.onchip_writes if is_fused else 0) for op in list_operations(point.config, workload)
        )
        return largest * workload.dtype.matmul_itemsize, actual.n_bytes


class _LargestTensorMode(TorchDispatchMode):
    """A dispatch mode that records the size of the largest floating-point tensor that any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.n_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.n_bytes = max(self.n_bytes, tensor.nbytes)
        return result
