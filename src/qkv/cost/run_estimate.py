"""Summarize the memory, FLOPs and time of a training run in one line before the first step."""

import math
from dataclasses import dataclass

from qkv.choices import BackendName, OptimizerKind
from qkv.config import ModelConfig
from qkv.cost.calibration import Calibration
from qkv.cost.estimate import Estimate, estimate_workload
from qkv.cost.prediction import TimePrediction, predict_time
from qkv.cost.units import format_bytes, format_count, format_duration, format_flops
from qkv.cost.workload import MAX_SIZE, DeviceType, Mode, Precision, Sharding, Workload
from qkv.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RunEstimate:
    """The estimated cost of a training run of `steps` updates.

    The time is available only if there is a calibration or a `matmul_rate`.
    """

    step: Estimate
    """Estimate for one micro-batch. Each update consists of `accumulation_steps` micro-batches."""
    steps: int
    matmul_rate: int | float | None
    """FLOP/s that the device reaches in large matmuls."""
    utilization: int | float
    """Fraction of `matmul_rate` that the training run reaches."""
    calibration: Calibration | None = None
    """Calibration of the device, or None. A calibration predicts the time more accurately than `utilization`."""
    backend: str = BackendName.AUTO
    """Backend that trains the model (default: the one that would be selected)."""

    @property
    def flops(self) -> int:
        return self.step.flops.total * self.step.workload.accumulation_steps * self.steps

    @property
    def seconds(self) -> float | None:
        if self.calibration is not None:
            return (
                self._predict_micro_batch(self.calibration).seconds * self.step.workload.accumulation_steps * self.steps
            )
        return None if self.matmul_rate is None else self.flops / (self.matmul_rate * self.utilization)

    @property
    def summary(self) -> str:
        """A one-line summary of the parameters, memory, FLOPs and, if known, the time."""
        workload = self.step.workload
        source = "" if workload.source_len is None else f" from {workload.source_len:,}"
        accumulation = f"{workload.accumulation_steps:,}×" if workload.accumulation_steps > 1 else ""
        shape = f"{accumulation}{workload.batch_size:,}×{workload.seq_len:,}{source}"
        parts = [
            f"{format_count(self.step.parameters.total)} parameters",
            f"{format_bytes(self.step.memory.peak)} for a step of {shape}",
            f"{format_flops(self.flops)} in {self.steps:,} steps",
        ]
        if workload.n_devices > 1:
            parts[1] = f"on each of {workload.n_devices} ({workload.sharding}) {parts[1]}"
        if self.seconds is not None:
            duration = format_duration(self.seconds)
            parts.append(("" if duration.startswith("under") else "about ") + duration + self._describe_time_source)
        return " · ".join(parts)

    def _predict_micro_batch(self, calibration: Calibration) -> TimePrediction:
        return predict_time(self.step.config, self.step.workload, calibration, backend=self.backend)

    @property
    def _describe_time_source(self) -> str:
        if self.calibration is not None:
            backend = self._predict_micro_batch(self.calibration).backend
            return f" ({backend} backend, calibrated on {self.calibration.device})"
        rate = format_flops(self.matmul_rate or 0.0)
        return f" at {self.utilization:.0%} of {rate}/s".replace("%", " %")


def estimate_run(
    config: ModelConfig,
    *,
    batch_size: int,
    seq_len: int,
    steps: int,
    matmul_rate: int | float | None = None,
    utilization: int | float = 0.3,
    source_len: int | None = None,
    dtype: Precision | str = Precision.FLOAT32,
    accumulation_steps: int = 1,
    activation_checkpointing: bool = False,
    loss_chunk_size: int | None = None,
    optimizer: OptimizerKind | str = OptimizerKind.ADAMW,
    ema: bool = False,
    logits_to_keep: int | None = None,
    device_type: DeviceType | str = DeviceType.CUDA,
    calibration: Calibration | None = None,
    backend: str = BackendName.AUTO,
    n_devices: int = 1,
    sharding: Sharding | str = Sharding.DDP,
) -> RunEstimate:
    """Estimate the cost of a training run. A `utilization` of 0.3 is typical for mid-sized models."""
    settings = {
        "batch_size": batch_size,
        "seq_len": seq_len,
        "source_len": source_len,
        "mode": Mode.TRAIN,
        "dtype": dtype,
        "accumulation_steps": accumulation_steps,
        "activation_checkpointing": activation_checkpointing,
        "loss_chunk_size": loss_chunk_size,
        "optimizer": optimizer,
        "ema": ema,
        "logits_to_keep": logits_to_keep,
        "device_type": device_type,
        "n_devices": n_devices,
        "sharding": sharding,
    }
    if not 1 <= steps <= MAX_SIZE:
        raise ConfigError(f"steps must be between 1 and {MAX_SIZE}, got {steps}")
    if matmul_rate is not None and not (math.isfinite(matmul_rate) and matmul_rate > 0):
        raise ConfigError(f"matmul_rate must be a finite number of FLOP/s greater than 0, got {matmul_rate}")
    if not 0 < utilization <= 1:
        raise ConfigError(f"utilization must be greater than 0 and at most 1, got {utilization}")
    workload = Workload(**settings)
    if calibration is not None:
        calibration.check_precision(workload.mode, workload.dtype)
    return RunEstimate(
        step=estimate_workload(config, workload),
        steps=steps,
        matmul_rate=matmul_rate,
        utilization=utilization,
        calibration=calibration,
        backend=backend,
    )
