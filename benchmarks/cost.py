"""Compare predicted and measured times for models and sizes that the calibration did not use."""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import machine
from benchmarks.cost_cases import Case, list_cases, list_long_context_cases
from benchmarks.results import Report
from benchmarks.runner import BenchmarkOptions, LogFunction
from qkv.choices import AttentionKernel
from qkv.cli.process import retain_freed_memory
from qkv.config import config_from_dict
from qkv.cost import Precision, Workload, list_operations
from qkv.cost.backends import select_backend
from qkv.cost.calibration import Calibration
from qkv.cost.prediction import TimePrediction, predict_time
from qkv.training.benchmark_steps import build_random_model, configure_model_and_build_step, measure_backend_step
from qkv.training.device_calibration import calibrate
from qkv.training.launch_overhead import build_tiny_forward_pass
from qkv.training.timer import Timer

ROUNDS = {"cpu": 3, "cuda": 4}
"""Number of rounds over all cases. The smallest time of each case counts because a shared machine can be slow for
seconds."""
SECONDS_PER_MEASUREMENT = {"cpu": 0.25, "cuda": 0.1}
"""Duration of each measurement in seconds."""
MEASURING_SECONDS = {"cpu": 900, "cuda": 400}
"""No round starts that would end later than this many seconds after the calibration."""
REFIT_NOTE = (
    "The calibration and the measurements are those of an earlier run. The prediction may have been changed since "
    "then, with the errors of that run in view. The machine above computed only the predictions."
)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The measured time of a case on the backend that runs it."""

    case: Case
    backend: str
    seconds: float
    largest_tensor: tuple[int, int] | None = None
    """Predicted and actual size of the largest tensor in bytes, which is measured only for long contexts."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.case.model,
            "config": self.case.config.model_dump(mode="json"),
            "workload": self.case.workload.model_dump(mode="json"),
            "backend": self.backend,
            "seconds": self.seconds,
            "largest_tensor": self.largest_tensor,
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "Measurement":
        config, workload = config_from_dict(saved["config"]), Workload(**saved["workload"])
        return cls(
            case=Case(model=saved["model"], config=config, workload=workload),
            backend=saved["backend"],
            seconds=saved["seconds"],
            largest_tensor=saved["largest_tensor"],
        )


@dataclass(frozen=True, kw_only=True)
class Point:
    """The predicted and measured times of one case."""

    measurement: Measurement
    prediction: TimePrediction

    @property
    def error(self) -> float:
        return self.prediction.seconds / self.measurement.seconds - 1

    @property
    def cells(self) -> list[str]:
        case = self.measurement.case
        workload = case.workload
        source = "" if workload.source_len is None else f" from {workload.source_len}"
        return [
            case.model,
            workload.mode.value,
            f"{workload.batch_size}×{workload.seq_len}{source}",
            workload.dtype.value,
            self.prediction.backend,
            *(f"{1000 * seconds:.3f}" for seconds in (self.prediction.seconds, self.measurement.seconds)),
            f"{self.error:+.0%}",
        ]


def cost(options: BenchmarkOptions) -> Report:
    """Calibrate the device, and compare predicted and measured times. Nothing is fitted to the measured cases.

    With `options.refit`, the measurements are read from a file of an earlier run, and only the predictions are new.
    """
    load = machine.load_average()
    if options.refit is not None:
        saved = json.loads(options.refit.read_text(encoding="utf-8"))
        measurements = [Measurement.from_dict(entry) for entry in saved["measurements"]]
        report = _report(Calibration(**saved["calibration"]), measurements, saved["pass_seconds"], load)
        return replace(report, notes=[*report.notes, REFIT_NOTE])
    device = torch.device(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    retain_freed_memory()
    dtype = Precision(options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    calibration = calibrate(device, dtype, options.log)
    options.log(f"calibrated {calibration.device} in {calibration.duration:.0f} s")
    runner = _MeasurementRunner(calibration, device, options.log)

    def save(measurements: Sequence[Measurement]) -> None:
        # A run that is interrupted must not lose its measurements.
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            for name, content in _files(calibration, measurements, runner.pass_seconds).items():
                (options.out / name).write_text(json.dumps(content) + "\n", encoding="utf-8")

    measurements = runner.measure_all(save)
    return _report(calibration, measurements, runner.pass_seconds, load)


def _report(
    calibration: Calibration, measurements: Sequence[Measurement], pass_seconds: list[float], load: float
) -> Report:
    points = [_predict(measurement, calibration) for measurement in measurements]
    short = [point for point in points if point.measurement.largest_tensor is None]
    long = [point for point in points if point.measurement.largest_tensor is not None]
    return Report(
        name=f"cost, {calibration.kind}",
        description=(
            "Measured times compared with predictions from a calibration of this device, for the backends that "
            "generate, translate, embed and train use. The calibration did not use any of these models and sizes."
        ),
        columns=["model", "mode", "batch × length", "dtype", "backend", "predicted ms", "measured ms", "error"],
        rows=[point.cells for point in [*short, *long]],
        notes=[*_notes(calibration, short, long), _describe_variation(pass_seconds)],
        versions={"torch": calibration.torch_version},
        load=load,
        files=_files(calibration, measurements, pass_seconds),
    )


def _files(
    calibration: Calibration, measurements: Sequence[Measurement], pass_seconds: list[float]
) -> dict[str, dict[str, Any]]:
    """Return the contents of the file from which `--refit` computes new predictions, keyed by its name."""
    return {
        f"cost-measurements-{calibration.kind}-{calibration.dtype.value}.json": {
            "calibration": calibration.model_dump(mode="json"),
            "pass_seconds": pass_seconds,
            "measurements": [measurement.as_dict() for measurement in measurements],
        }
    }


def _predict(measurement: Measurement, calibration: Calibration) -> Point:
    case = measurement.case
    # Long contexts compare the attention kernels of the eager backend.
    prediction = predict_time(case.config, case.workload, calibration, backend=measurement.backend)
    return Point(measurement=measurement, prediction=prediction)


def _notes(calibration: Calibration, short: list[Point], long: list[Point]) -> list[str]:
    errors = [abs(point.error) for point in short]
    worst = max(short, key=lambda point: abs(point.error))
    by_mode = []
    for mode in sorted({point.measurement.case.workload.mode for point in short}):
        of_mode = [abs(point.error) for point in short if point.measurement.case.workload.mode is mode]
        by_mode.append(f"{mode.value} {sum(of_mode) / len(of_mode):.0%}")
    notes = [
        f"Calibration: {calibration.device}, {calibration.dtype.value}, {calibration.duration:.0f} s.",
        f"Mean error of {len(short)} points: {sum(errors) / len(errors):.1%}. Worst error: {worst.error:+.0%} ("
        + " ".join(worst.cells[:3])
        + "). Mean error by mode: "
        + ", ".join(by_mode)
        + ".",
    ]
    for point in long:
        case, largest = point.measurement.case, point.measurement.largest_tensor
        assert largest is not None
        notes.append(
            f"Context of {case.workload.seq_len} tokens with {case.workload.kernel.value} attention: the largest "
            f"tensor has {largest[1]:,} bytes (predicted: {largest[0]:,}), and the forward pass takes "
            f"{1000 * point.measurement.seconds:.1f} ms (predicted: {1000 * point.prediction.seconds:.1f} ms)."
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
    """A runner that measures cases on one device and keeps the smallest time over several rounds."""

    def __init__(self, calibration: Calibration, device: torch.device, log: LogFunction) -> None:
        self.calibration, self.device, self.log = calibration, device, log
        self.timer = Timer(device)
        self.pass_seconds: list[float] = []
        """Durations in seconds of the small forward pass that runs before each measurement. The pass is launch-bound,
        so its durations show how much the machine's speed varies."""
        self._tiny_pass = build_tiny_forward_pass(device, calibration.dtype)

    def measure_all(self, save: Callable[[Sequence[Measurement]], None] = lambda _: None) -> list[Measurement]:
        """Measure all cases, followed by the long contexts. `save` is called after every 10 measurements."""
        cases = [(case, "auto") for case in list_cases(self.device.type, self.calibration.dtype)]
        long = [(case, "eager") for case in list_long_context_cases(self.device.type, self.calibration.dtype)]
        result: dict[int, Measurement] = {}
        started, round_seconds = time.perf_counter(), 0.0
        n_rounds = ROUNDS[self.device.type]
        for round_number in range(n_rounds):
            round_start = time.perf_counter()
            if round_number and round_start + round_seconds > started + MEASURING_SECONDS[self.device.type]:
                break
            self.log(f"round {round_number + 1} of {n_rounds}")
            for index, (case, backend) in enumerate([*cases, *long]):
                try:
                    measurement = self._measure(case, backend, is_long=index >= len(cases))
                except Exception as error:  # noqa: BLE001 - a failing case must not prevent the other measurements
                    self.log(f"Failed: {case.model} {case.workload.mode.value}: {type(error).__name__}: {error}")
                    continue
                self.log("  ".join(_predict(measurement, self.calibration).cells))
                if index not in result or measurement.seconds < result[index].seconds:
                    result[index] = measurement
                if index % 10 == 0:
                    save([result[index] for index in sorted(result)])
            round_seconds = time.perf_counter() - round_start
        return [result[index] for index in sorted(result)]

    def _measure(self, case: Case, backend: str, *, is_long: bool) -> Measurement:
        backend = select_backend(case.config, case.workload, self.device.type, backend)
        model = build_random_model(case.config, self.device, case.workload.dtype)
        self.pass_seconds.append(
            self.timer.measure_lower_quartile_latency(self._tiny_pass, is_warm=bool(self.pass_seconds))
        )
        seconds = measure_backend_step(
            model, case.workload, backend, self.timer, seconds=SECONDS_PER_MEASUREMENT[self.device.type]
        )
        largest_tensor = None
        if is_long:
            largest_tensor = _largest_tensor(case, configure_model_and_build_step(model, case.workload))
        return Measurement(case=case, backend=backend, seconds=seconds, largest_tensor=largest_tensor)


def _largest_tensor(case: Case, step: Any) -> tuple[int, int]:  # noqa: ANN401
    """Return the predicted size and the actual size of the largest tensor in bytes."""
    with _LargestTensorMode() as actual:
        step()
    is_fused = case.workload.kernel is AttentionKernel.FUSED
    largest = max(
        op.writes - (op.onchip_writes if is_fused else 0) for op in list_operations(case.config, case.workload)
    )
    return largest * case.workload.dtype.matmul_itemsize, actual.n_bytes


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
