"""What a training run will take, in one line, before its first step."""

import math
from dataclasses import dataclass

from qkv.choices import OptimizerKind
from qkv.config import ModelConfig
from qkv.cost.estimate import Estimate, estimate_of
from qkv.cost.readable import readable_bytes, readable_count, readable_flops, readable_time
from qkv.cost.workload import HUGE, Backend, Mode, Precision, Workload
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

    @property
    def flops(self) -> int:
        return self.step.flops.total * self.step.work.accumulation * self.steps

    @property
    def seconds(self) -> float | None:
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
        if self.seconds is not None and self.matmul_rate is not None:
            rate = readable_flops(self.matmul_rate)
            time = readable_time(self.seconds)
            about = "" if time.startswith("under") else "about "
            said.append(f"{about}{time} at {self.share:.0%} of {rate}/s".replace("%", " %"))
        return " · ".join(said)


def preflight(
    config: ModelConfig, *, batch: int, length: int, steps: int, matmul_rate: int | float | None = None,
    share: int | float = 0.3, source_length: int | None = None, dtype: Precision | str = Precision.FLOAT32,
    accumulation: int = 1, checkpointing: bool = False, loss_chunk: int | None = None,
    optimizer: OptimizerKind | str = OptimizerKind.ADAMW, averaging: bool = False, predictions: int | None = None,
    backend: Backend | str = Backend.CUDA,
) -> Preflight:  # fmt: skip
    """`share` of 0.3 is usual for middle-sized models; pass a measured one where there is one."""
    settings = {
        "batch": batch, "length": length, "source_length": source_length, "mode": Mode.TRAIN, "dtype": dtype,
        "accumulation": accumulation, "checkpointing": checkpointing, "loss_chunk": loss_chunk,
        "optimizer": optimizer, "averaging": averaging, "predictions": predictions, "backend": backend,
    }  # fmt: skip
    if not 1 <= steps <= HUGE:
        raise ConfigError(f"steps={steps} must be from 1 to {HUGE}")
    if matmul_rate is not None and not (math.isfinite(matmul_rate) and matmul_rate > 0):
        raise ConfigError(f"matmul_rate={matmul_rate} must be a number of FLOP/s above 0")
    if not 0 < share <= 1:
        raise ConfigError(f"share={share} must be above 0 and at most 1")
    return Preflight(step=estimate_of(config, Workload(**settings)), steps=steps, matmul_rate=matmul_rate, share=share)
