"""Predicted and measured time of models and sizes that the calibration did not see, and of long contexts."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import machine
from benchmarks.cost_kernels import kernels_of
from benchmarks.cost_points import models, sizes
from benchmarks.results import Report
from benchmarks.runner import Asked, Say
from qkv.choices import Kernel
from qkv.config import GPTConfig, ModelConfig
from qkv.cost import Mode, Precision, Workload, operations
from qkv.cost.calibration import Calibration
from qkv.cost.prediction import Prediction, predict
from qkv.training.calibrating import calibrate
from qkv.training.launching import small_pass
from qkv.training.measuring import Step, random_model, step_of
from qkv.training.stopwatch import Stopwatch, keep_freed_memory

CONTEXTS = (1024, 2048, 4096)
ROUNDS = {"cpu": 3, "cuda": 8}
"""Each point is measured so often, all others in between; the least counts: a shared machine is slow for seconds."""
SPEND = {"cpu": 0.25, "cuda": 0.1}
"""Seconds for each measurement."""
GPU_SECONDS, STUDY_SECONDS = 90, 5
"""A GPU's time is dear: rounds are left out where all would take longer, and its kernels are looked at so long."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One model at one size, and what came of it."""

    model: str
    config: ModelConfig
    work: Workload
    prediction: Prediction
    measured: float
    square: tuple[int, int] | None = None
    """Of a long context: bytes of the largest tensor, predicted and seen."""

    @property
    def predicted(self) -> float:
        return self.prediction.seconds

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def cells(self) -> list[str]:
        work = self.work
        source = "" if work.source_length is None else f" from {work.source_length}"
        times = [f"{1000 * seconds:.3f}" for seconds in (self.predicted, self.measured)]
        name = self.model if work.kernel.value == "fused" else f"{self.model}, plain"
        return [
            name,
            work.mode.value,
            f"{work.batch}×{work.length}{source}",
            *times,
            f"{self.error:+.0%}",
            self.prediction.bound_by,
        ]

    def as_dict(self) -> dict[str, Any]:
        parts = [[one.part, one.name, one.runs, 1000 * one.seconds] for one in self.prediction.spent]
        sums = {f"predicted_{name}_ms": 1000 * seconds for name, seconds in self.prediction.as_dict().items()}
        return {
            "model": self.model, "mode": self.work.mode.value, "batch": self.work.batch, "length": self.work.length,
            "measured_ms": 1000 * self.measured, **sums,
            "error": self.error, "bound_by": self.prediction.bound_by,
            "parts": parts, "config": self.config.model_dump(mode="json"), "work": self.work.model_dump(mode="json"),
        }  # fmt: skip


def cost(asked: Asked) -> Report:
    """Calibrate, then predict and measure; nothing is fitted to these points."""
    started, load, device = time.perf_counter(), machine.others_load(), torch.device(asked.device)
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    keep_freed_memory()
    dtype = Precision.BFLOAT16 if device.type == "cuda" else Precision.FLOAT32
    calibration = calibrate(device, dtype, asked.say)
    asked.say(f"calibrated {calibration.device} in {calibration.took:.0f} s")
    until = started + GPU_SECONDS if device.type == "cuda" else math.inf
    trials = _Trials(calibration, device, asked.say, until=until)
    found, long = trials.rounds()
    return Report(
        name=f"cost, {device.type}",
        what="Predicted by a calibration of this device that saw none of these models and sizes, and measured.",
        columns=["model", "mode", "batch × length", "predicted ms", "measured ms", "error", "bound by"],
        rows=[point.cells for point in [*found, *long]],
        notes=[*_notes(calibration, found, long), _wandering(trials.pace)],
        versions={"torch": torch.__version__},
        load=load,
        files={
            "cost-calibration.json": calibration.model_dump(mode="json"),
            "cost-points.json": {
                "summary": _summary(found), "pace": trials.pace, "points": trials.studied(found),
                "long_contexts": trials.studied(long),
            },
        },
    )  # fmt: skip


def _summary(points: Sequence[Point]) -> Mapping[str, float]:
    errors = [abs(point.error) for point in points]
    return {"points": len(errors), "mean_error": sum(errors) / len(errors), "worst_error": max(errors)}


def _notes(calibration: Calibration, found: list[Point], long: list[Point]) -> list[str]:
    worst = max(found, key=lambda point: abs(point.error))
    by_mode = []
    for mode in sorted({point.work.mode for point in found}):
        errors = [abs(point.error) for point in found if point.work.mode is mode]
        by_mode.append(f"{mode.value} {sum(errors) / len(errors):.0%}")
    said = [
        f"Calibration: {calibration.device}, {calibration.dtype.value}, {calibration.took:.0f} s.",
        f"Mean error of {len(found)} points: {_summary(found)['mean_error']:.1%}; worst {worst.error:+.0%}: "
        + " ".join(worst.cells[:3]) + ". By mode: " + ", ".join(by_mode) + ".",
    ]  # fmt: skip
    for point in long:
        assert point.square is not None
        predicted, seen = point.square
        said.append(
            f"Context {point.work.length}, {point.work.kernel.value} attention: largest tensor {seen:,} bytes "
            f"(predicted {predicted:,}), {1000 * point.measured:.1f} ms (predicted {1000 * point.predicted:.1f})."
        )
    return said


def _wandering(pace: list[float]) -> str:
    least, middle, most = (1000 * one for one in (min(pace), statistics.median(pace), max(pace)))
    return (
        f"The machine's own pace: between the points one and the same small pass took {least:.2f} to {most:.2f} ms, "
        f"{middle:.2f} at the median."
    )


class _Trials:
    """Points tried on one device: predicted, measured, and the least of several rounds kept."""

    def __init__(self, calibration: Calibration, device: torch.device, say: Say, *, until: float) -> None:
        """`until`: when to end, by `time.perf_counter`; no round begins that would last longer."""
        self.calibration, self.device, self.say, self.until = calibration, device, say, until
        self.watch = Stopwatch(device)
        self.pace: list[float] = []
        """Seconds of one small pass before each measurement: launching alone, so what varies is the machine."""
        self._small = small_pass(device, calibration.dtype)
        self._steps: dict[tuple[str, Workload], Step] = {}

    def rounds(self) -> tuple[list[Point], list[Point]]:
        """The points, and the long contexts."""
        points, long = self._points(), self._long_contexts()
        found: dict[int, Point] = {}
        lasted = 0.0
        n_rounds = ROUNDS[self.device.type]
        for turn in range(n_rounds):
            began = time.perf_counter()
            if turn and began + lasted > self.until:
                break
            self.say(f"round {turn + 1} of {n_rounds}")
            for place, (name, config, work) in enumerate([*points, *long]):
                try:
                    point = self._measure(name, config, work)
                except RuntimeError as error:
                    # One model too large for a device must not cost the others their figures.
                    self.say(f"Failed: {name} {work.mode.value}: {str(error).splitlines()[0]}")
                    continue
                self.say("  ".join(point.cells))
                if place not in found or point.measured < found[place].measured:
                    found[place] = point
            lasted = time.perf_counter() - began
        ours, later = (
            [point for place, point in found.items() if (place >= len(points)) == is_late] for is_late in (False, True)
        )
        return ours, [replace(point, square=self._largest_tensor(point)) for point in later]

    def _points(self) -> list[tuple[str, ModelConfig, Workload]]:
        known, asked = models(self.device.type), []
        for name, mode, size in sizes(self.device.type):
            dtype = self.calibration.training_dtype if mode == "train" else self.calibration.dtype
            asked.append((name, known[name], Workload(**size, mode=Mode(mode), dtype=dtype)))
        return asked

    def _long_contexts(self) -> list[tuple[str, ModelConfig, Workload]]:
        """A context of 1024, 2048, 4096, plain and fused: time, and the N×N table that only the plain road holds."""
        d_model = 768 if self.device.type == "cuda" else 128
        config = GPTConfig(vocab_size=512, context_length=4096, d_model=d_model, n_heads=d_model // 64, n_layers=2)
        works = [
            Workload(batch=1, length=n, mode=Mode.FORWARD, dtype=self.calibration.dtype, kernel=kernel)
            for n in CONTEXTS
            for kernel in Kernel
        ]
        return [(f"gpt {d_model}×2", config, work) for work in works]

    def _measure(self, name: str, config: ModelConfig, work: Workload) -> Point:
        is_warm = (name, work) in self._steps
        step = self._step(name, config, work)
        self.pace.append(self.watch.whole(self._small, is_warm=bool(self.pace)))
        measured = self.watch.whole(step, spend=SPEND[self.device.type], is_warm=is_warm)
        prediction = predict(config, work, self.calibration)
        return Point(model=name, config=config, work=work, prediction=prediction, measured=measured)

    def _step(self, name: str, config: ModelConfig, work: Workload) -> Step:
        if (name, work) not in self._steps:
            self._steps[name, work] = step_of(random_model(config, self.device, work.dtype), work)
        return self._steps[name, work]

    def studied(self, points: list[Point]) -> list[dict[str, Any]]:
        """All figures of each; of a GPU also its kernels, as far as there is time."""
        made = []
        for point in points:
            made.append(point.as_dict())
            if self.device.type == "cuda" and time.perf_counter() < self.until + STUDY_SECONDS:
                try:
                    made[-1] |= kernels_of(self._step(point.model, point.config, point.work))
                except RuntimeError as error:
                    self.say(f"not profiled: {point.model}: {str(error).splitlines()[0]}")
        return made

    def _largest_tensor(self, point: Point) -> tuple[int, int]:
        """Bytes, predicted and seen."""
        with _Largest() as seen:
            self._step(point.model, point.config, point.work)()
        work = point.work
        is_fused = work.kernel is Kernel.FUSED
        held = max(one.writes - (one.inside_writes if is_fused else 0) for one in operations(point.config, work))
        return held * work.dtype.narrow, seen.n_bytes


class _Largest(TorchDispatchMode):
    """Sees every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.n_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, torch.Tensor) and one.is_floating_point():
                self.n_bytes = max(self.n_bytes, one.nbytes)
        return result
