"""Estimate the parameters, FLOPs, memory and memory traffic of one step from a model config."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qkv.choices import AttentionKernel, OptimizerKind
from qkv.config import ModelConfig, RNNConfig, Seq2SeqConfig, preset
from qkv.cost.explanation import explain_crossover_intensity_or_recurrence
from qkv.cost.flops import Flops, flops_recomputed_in_backward, sum_flops
from qkv.cost.kernel_launch import KernelLaunch, list_kernel_launches
from qkv.cost.memory import MemoryEstimate, estimate_memory
from qkv.cost.memory_traffic import MemoryTraffic, estimate_traffic
from qkv.cost.operation import Operation
from qkv.cost.operations import list_operations
from qkv.cost.optimizer_update import (
    CommunicationBytes,
    ParametersByOptimizer,
    communication_volume,
    split_device_parameters_by_optimizer,
)
from qkv.cost.parameters import ParameterCounts, count_parameters
from qkv.cost.units import format_bytes, format_count, format_flops
from qkv.cost.workload import DeviceType, Mode, Precision, Sharding, Workload
from qkv.errors import ConfigError

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
