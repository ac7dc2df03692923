"""Estimate the cost of one step or of a training run: parameters, FLOPs, memory and bytes moved."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qkv.choices import AttentionKernel, BackendName, OptimizerKind
from qkv.config import ModelConfig, RNNConfig, Seq2SeqConfig, preset
from qkv.cost.calibration import Calibration
from qkv.cost.explanation import explain_crossover_intensity_or_recurrence
from qkv.cost.kernel_launch import (
    CommunicationBytes,
    KernelLaunch,
    MemoryTraffic,
    ParametersByOptimizer,
    communication_volume,
    estimate_traffic,
    list_kernel_launches,
    split_device_parameters_by_optimizer,
)
from qkv.cost.memory import MemoryEstimate, estimate_memory
from qkv.cost.operation import Flops, Operation, ParameterCounts, flops_recomputed_in_backward, sum_flops
from qkv.cost.operations import count_parameters, list_operations
from qkv.cost.prediction import TimePrediction, predict_time
from qkv.cost.workload import MAX_SIZE, DeviceType, Mode, Precision, Sharding, Workload
from qkv.errors import ConfigError

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_FLOP_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y", "R", "Q")
_COUNT_PREFIXES = ("", "K", "M", "B", "T")
_MINUTE, _HOUR, _DAY, _YEAR = 60, 3600, 86400, 31_557_600


def format_count(n: int) -> str:
    """Format a count with the prefixes K, M, B and T, for example 10.7M or 8.0B."""
    number, prefix = _scale_to_unit(n, 1000, _COUNT_PREFIXES)
    return f"{number}{prefix}"


def format_bytes(n: int) -> str:
    """Format a number of bytes with binary units (powers of 1024), for example 1.3 GiB."""
    number, unit = _scale_to_unit(n, 1024, _BYTE_UNITS)
    return f"{number} {unit}"


def format_flops(n: int | float) -> str:
    """Format a number of FLOPs with SI prefixes, for example 2.1 PFLOP."""
    number, prefix = _scale_to_unit(n, 1000, _FLOP_PREFIXES)
    return f"{number} {prefix}FLOP"


def format_duration(seconds: int | float) -> str:
    """Format a duration with at most two significant digits below a year, such as 45 s, 2.8 min, 5.2 h or 12 days."""
    for limit, unit, name in ((2 * _MINUTE, 1, "s"), (2 * _HOUR, _MINUTE, "min"), (2 * _DAY, _HOUR, "h")):
        if seconds < limit:
            number = seconds / unit
            return "under 1 s" if number < 1 else f"{number:.2g} {name}" if number < 10 else f"{number:.0f} {name}"
    if seconds < 2 * _YEAR:
        return f"{seconds / _DAY:,.0f} days"
    return f"{seconds / _YEAR:,.0f} years"


def _scale_to_unit(n: int | float, base: int, units: tuple[str, ...]) -> tuple[str, str]:
    """Divide by `base` until the number is less than `base`, and return the formatted number and its unit.

    Numbers that are too large for the last unit are shown with more digits.
    """
    i = 0
    while i + 1 < len(units) and round(n, 1) >= base:
        n, i = n / base, i + 1
    return (f"{n:,.0f}" if i == 0 or n >= 100 else f"{n:.1f}"), units[i]


CONVENTIONS = (
    "FLOPs are counted only for matmuls, and one multiply–add counts as 2 FLOPs. Useful FLOPs exclude masked query–key "
    "pairs. Tied tensors are counted once. Fused attention never writes the n×n scores. Without fusion, every "
    "operation reads its inputs and writes its outputs."
)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimated cost of one step.

    The repr is a readable report. `as_dict` returns the same numbers as plain data, and `operation_rows` returns one
    row per operation.
    """

    config: ModelConfig
    workload: Workload
    operations: tuple[Operation, ...]
    parameters: ParameterCounts
    flops: Flops
    memory: MemoryEstimate
    traffic: MemoryTraffic
    update: ParametersByOptimizer
    communication: CommunicationBytes

    @property
    def launches(self) -> list[KernelLaunch]:
        """The kernels that the step launches, ordered by phase."""
        update = (
            self.update.clipping_and_update_launches(self.workload.dtype) if self.workload.mode is Mode.TRAIN else []
        )
        return [*list_kernel_launches(self.operations, self.workload), *update]

    @property
    def intensity(self) -> float:
        """Arithmetic intensity of the forward pass in FLOPs per byte, using the attention kernel of the workload."""
        is_fused = self.workload.kernel is AttentionKernel.FUSED
        return self.flops.forward / (self.traffic.forward_fused if is_fused else self.traffic.forward_unfused)

    def as_dict(self) -> dict[str, Any]:
        return {
            "family": self.config.family,
            "workload": self.workload.model_dump(mode="json", exclude_none=True),
            "parameters": self.parameters.as_dict(),
            "flops": self.flops.as_dict(),
            "memory": self.memory.as_dict(),
            "traffic": self.traffic.as_dict(),
            "communication": self.communication.as_dict(),
            "intensity": self.intensity,
            "explanation": explain_crossover_intensity_or_recurrence(self.config, self.workload),
            "conventions": CONVENTIONS,
        }

    def operation_rows(self, *, peak: float | None = None, bandwidth: float | None = None) -> list[dict[str, Any]]:
        """Return the costs of each operation, summed over its runs, as a list of flat dicts.

        The list can be passed to a DataFrame. If a device's peak (FLOP/s) and bandwidth (bytes/s) are given, each row
        also contains `bound_by`, which is `compute` or `memory`.
        """
        if (peak is None) != (bandwidth is None):
            raise ConfigError(
                f"peak and bandwidth must both be given or both be None, got peak={peak} and bandwidth={bandwidth}"
            )
        rows = [operation_row(op, self.workload) for op in self.operations]
        if peak is not None and bandwidth is not None:
            for row in rows:
                row["bound_by"] = "compute" if row["intensity"] * bandwidth > peak else "memory"
        return rows

    def __repr__(self) -> str:
        memory = {name: n for name, n in self.memory.as_dict().items() if n}
        traffic = {name: n for name, n in self.traffic.as_dict().items() if n}
        flops = {name: n for name, n in self.flops.as_dict().items() if n}
        communication = {name: n for name, n in self.communication.as_dict().items() if n}
        return "\n".join(
            [
                self.title,
                *_format_section("parameters", self.parameters.as_dict(), format_count),
                *_format_section("FLOPs", flops, format_flops),
                *_format_section("memory (bytes)", memory, format_bytes),
                *_format_section("memory traffic (bytes)", traffic, format_bytes),
                *(_format_section("sent by each device (bytes)", communication, format_bytes) if communication else []),
                *explain_crossover_intensity_or_recurrence(self.config, self.workload),
                f"({CONVENTIONS})",
            ]
        )

    @property
    def title(self) -> str:
        """A one-line description of the model family and workload."""
        workload = self.workload
        source = f" from {workload.n_source:,}" if isinstance(self.config, Seq2SeqConfig | RNNConfig) else ""
        new = "" if workload.n_new_tokens is None else f" + {workload.n_new_tokens:,} new"
        return (
            f"{self.config.family} · {workload.mode.value} · {workload.batch_size:,}×{workload.seq_len:,}{new} "
            f"tokens{source} · {workload.dtype.value} · {workload.kernel.value} attention"
        )


def operation_row(op: Operation, workload: Workload) -> dict[str, Any]:
    """Return the costs of an operation as a flat dict, in which `intensity` refers to the forward pass."""
    is_training = workload.mode is Mode.TRAIN
    casts = sum(op.weight_cast_bytes_moved(workload.dtype)) * op.copies
    unfused, fused = (
        sum(op.forward_bytes(workload.dtype, fused=is_fused)) * op.runs + casts for is_fused in (False, True)
    )
    backward_unfused, backward_fused = (
        sum(op.backward_bytes(workload.dtype, fused=is_fused)) * op.runs if is_training else 0
        for is_fused in (False, True)
    )
    n_bytes = fused if workload.kernel is AttentionKernel.FUSED else unfused
    return {
        "part": op.part,
        "operation": op.name,
        "phase": op.phase.value,
        "runs": op.runs,
        "parameters": op.n_parameters,
        "flops": op.flops,
        "useful_flops": op.useful_flops,
        "backward_flops": op.backward_flops if is_training else 0,
        "recomputed_flops": flops_recomputed_in_backward(op, workload) if is_training else 0,
        "elementwise_flops": op.elementwise_flops,
        "bytes_unfused": unfused,
        "bytes_fused": fused,
        "backward_bytes_unfused": backward_unfused,
        "backward_bytes_fused": backward_fused,
        "intensity": op.flops / n_bytes if n_bytes else 0.0,
    }


def estimate(
    config: ModelConfig | str,
    *,
    batch_size: int = 1,
    seq_len: int | None = None,
    source_len: int | None = None,
    mode: Mode | str = Mode.FORWARD,
    n_new_tokens: int | None = None,
    logits_to_keep: int | None = None,
    dtype: Precision | str = Precision.FLOAT32,
    kernel: AttentionKernel | str = AttentionKernel.FUSED,
    activation_checkpointing: bool = False,
    loss_chunk_size: int | None = None,
    accumulation_steps: int = 1,
    optimizer: OptimizerKind | str = OptimizerKind.ADAMW,
    ema: bool = False,
    n_devices: int = 1,
    sharding: Sharding | str = Sharding.DDP,
    device_type: DeviceType | str = DeviceType.CUDA,
) -> Estimate:
    """Estimate the cost of one step for a config or preset, without allocating any tensors.

    `seq_len` defaults to the context length of the model. See `Workload` for the other settings.
    """
    model_config = preset(config) if isinstance(config, str) else config
    settings = {
        "batch_size": batch_size,
        "seq_len": model_config.context_length if seq_len is None else seq_len,
        "source_len": source_len,
        "mode": mode,
        "n_new_tokens": n_new_tokens,
        "logits_to_keep": logits_to_keep,
        "dtype": dtype,
        "kernel": kernel,
        "activation_checkpointing": activation_checkpointing,
        "loss_chunk_size": loss_chunk_size,
        "accumulation_steps": accumulation_steps,
        "optimizer": optimizer,
        "ema": ema,
        "n_devices": n_devices,
        "sharding": sharding,
        "device_type": device_type,
    }
    return estimate_workload(model_config, Workload(**settings))


def estimate_workload(config: ModelConfig, workload: Workload) -> Estimate:
    """Estimate the cost of one step of a model for the given workload."""
    operations = list_operations(config, workload)
    parameters = count_parameters(config)
    update = split_device_parameters_by_optimizer(operations, parameters.total, workload)
    return Estimate(
        config=config,
        workload=workload,
        operations=tuple(operations),
        parameters=parameters,
        flops=sum_flops(operations, workload),
        memory=estimate_memory(operations, config, workload),
        traffic=estimate_traffic(operations, workload, update),
        update=update,
        communication=communication_volume(parameters.total, workload),
    )


def _format_section(title: str, numbers: dict[str, int], format_number: Callable[[int], str]) -> list[str]:
    name_width = max(len(name) for name in numbers)
    digits = max(len(f"{n:,}") for n in numbers.values())
    return [title, *(f"  {name:<{name_width}}  {n:>{digits},}  {format_number(n)}" for name, n in numbers.items())]


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
            return f" ({backend} backend, calibrated on {self.calibration.device_and_date})"
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
