"""What a training run will take, in one line, before its first step."""

import math
from dataclasses import dataclass

from qkv.choices import OptimizerKind
from qkv.config import ModelConfig
from qkv.cost.calibration import Calibration
from qkv.cost.estimate import Estimate, estimate_of
from qkv.cost.prediction import predict
from qkv.cost.readable import readable_bytes, readable_count, readable_flops, readable_time
from qkv.cost.workload import HUGE, Backend, Mode, Precision, Sharding, Workload
from qkv.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """A run of `steps` updates. `matmul_rate`: FLOP/s of the device's large products; None: time is not told."""

    step: Estimate
    """Of one batch; an update has `accumulation` of them."""
    steps: int
    matmul_rate: int | float | None
    share: int | float
    """What part of that rate training reaches."""
    calibration: Calibration | None = None
    """Of the device, where there is one: a better time than a share of the rate."""

    @property
    def flops(self) -> int:
        return self.step.flops.total * self.step.work.accumulation * self.steps

    @property
    def seconds(self) -> float | None:
        if self.calibration is not None:
            batch = predict(self.step.config, self.step.work, self.calibration).seconds
            return batch * self.step.work.accumulation * self.steps
        return None if self.matmul_rate is None else self.flops / (self.matmul_rate * self.share)

    @property
    def line(self) -> str:
        work = self.step.work
        source = "" if work.source_length is None else f" from {work.source_length:,}"
        batch = f"{work.accumulation:,}×" if work.accumulation > 1 else ""
        said = [
            f"{readable_count(self.step.parameters.total)} parameters",
            f"{readable_bytes(self.step.memory.peak)} for a step of {batch}{work.batch:,}×{work.length:,}{source}",
            f"{readable_flops(self.flops)} in {self.steps:,} steps",
        ]
        if work.n_devices > 1:
            said[1:] = [f"on each of {work.n_devices} ({work.sharding}) {said[1]}", said[2]]
        if self.seconds is not None:
            time = readable_time(self.seconds)
            said.append(("" if time.startswith("under") else "about ") + time + self._by)
        return " · ".join(said)

    @property
    def _by(self) -> str:
        """Where the time comes from."""
        if self.calibration is not None:
            return f" by the calibration of {self.calibration.device}"
        rate = readable_flops(self.matmul_rate or 0.0)
        return f" at {self.share:.0%} of {rate}/s".replace("%", " %")


def preflight(
    config: ModelConfig, *, batch: int, length: int, steps: int, matmul_rate: int | float | None = None,
    share: int | float = 0.3, source_length: int | None = None, dtype: Precision | str = Precision.FLOAT32,
    accumulation: int = 1, checkpointing: bool = False, loss_chunk: int | None = None,
    optimizer: OptimizerKind | str = OptimizerKind.ADAMW, averaging: bool = False, predictions: int | None = None,
    backend: Backend | str = Backend.CUDA, calibration: Calibration | None = None, n_devices: int = 1,
    sharding: Sharding | str = Sharding.DDP,
) -> Preflight:  # fmt: skip
    """`share` of 0.3 is usual for middle-sized models; pass a measured one where there is one."""
    settings = {
        "batch": batch, "length": length, "source_length": source_length, "mode": Mode.TRAIN, "dtype": dtype,
        "accumulation": accumulation, "checkpointing": checkpointing, "loss_chunk": loss_chunk,
        "optimizer": optimizer, "averaging": averaging, "predictions": predictions, "backend": backend,
        "n_devices": n_devices, "sharding": sharding,
    }  # fmt: skip
    if not 1 <= steps <= HUGE:
        raise ConfigError(f"steps={steps} must be from 1 to {HUGE}")
    if matmul_rate is not None and not (math.isfinite(matmul_rate) and matmul_rate > 0):
        raise ConfigError(f"matmul_rate={matmul_rate} must be a number of FLOP/s above 0")
    if not 0 < share <= 1:
        raise ConfigError(f"share={share} must be above 0 and at most 1")
    work = Workload(**settings)
    if calibration is not None:
        calibration.check(work.mode, work.dtype)
    return Preflight(
        step=estimate_of(config, work), steps=steps, matmul_rate=matmul_rate, share=share, calibration=calibration
    )
