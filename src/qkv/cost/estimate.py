"""What a step of a model costs, before it is spent: parameters, FLOPs and bytes from the config alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qkv.choices import Kernel, OptimizerKind
from qkv.config import ModelConfig, RNNConfig, Seq2SeqConfig, preset
from qkv.cost.flops import Flops, flops_of, recomputed
from qkv.cost.launch import Launch, launches
from qkv.cost.memory import Memory, memory_of
from qkv.cost.operation import Operation
from qkv.cost.operations import operations
from qkv.cost.parameters import Parameters, parameters
from qkv.cost.readable import readable_bytes, readable_count, readable_flops
from qkv.cost.traffic import Traffic, traffic_of
from qkv.cost.update import Communication, Update, communication_of, update_of
from qkv.cost.words import words
from qkv.cost.workload import Backend, Mode, Precision, Sharding, Workload
from qkv.errors import ConfigError

CONVENTIONS = (
    "A multiply–add is 2 FLOPs; FLOPs are those of matrix products. Useful are those that the mask lets count. "
    "Tied tensors count once. Fused attention never writes its n×n scores; unfused, every operation reads and writes."
)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The whole answer; its repr is a page to read, `as_dict` the same as plain data, `rows` a table to sort."""

    config: ModelConfig
    work: Workload
    operations: tuple[Operation, ...]
    parameters: Parameters
    flops: Flops
    memory: Memory
    traffic: Traffic
    update: Update
    communication: Communication

    @property
    def launches(self) -> list[Launch]:
        """The kernels of the step, in order of phase: what a time is made from."""
        of_update = self.update.launches(self.work.dtype) if self.work.mode is Mode.TRAIN else []
        return [*launches(self.operations, self.work), *of_update]

    @property
    def intensity(self) -> float:
        """FLOPs a byte moved, forward, by this workload's kernel."""
        moved = self.traffic.fused if self.work.kernel is Kernel.FUSED else self.traffic.unfused
        return self.flops.forward / moved

    def as_dict(self) -> dict[str, Any]:
        return {
            "family": self.config.family,
            "work": self.work.model_dump(mode="json", exclude_none=True),
            "parameters": self.parameters.as_dict(),
            "flops": self.flops.as_dict(),
            "memory": self.memory.as_dict(),
            "traffic": self.traffic.as_dict(),
            "communication": self.communication.as_dict(),
            "intensity": self.intensity,
            "words": words(self.config, self.work),
            "conventions": CONVENTIONS,
        }

    def rows(self, *, peak: float | None = None, bandwidth: float | None = None) -> list[dict[str, Any]]:
        """One flat dict an operation, all its runs together: a DataFrame takes it as it is.

        With a device's peak (FLOP/s) and bandwidth (bytes/s): also what bounds each, `compute` or `memory`.
        """
        if (peak is None) != (bandwidth is None):
            raise ConfigError(f"peak={peak} and bandwidth={bandwidth} must be given together")
        made = [row_of(one, self.work) for one in self.operations]
        if peak is not None and bandwidth is not None:
            for row in made:
                row["bound_by"] = "compute" if row["intensity"] * bandwidth > peak else "memory"
        return made

    def __repr__(self) -> str:
        held = {name: n for name, n in self.memory.as_dict().items() if n}
        moved = {name: n for name, n in self.traffic.as_dict().items() if n}
        computed = {name: n for name, n in self.flops.as_dict().items() if n}
        sent = {name: n for name, n in self.communication.as_dict().items() if n}
        return "\n".join(
            [
                self.title,
                *_section("parameters", self.parameters.as_dict(), readable_count),
                *_section("FLOPs", computed, readable_flops),
                *_section("bytes held", held, readable_bytes),
                *_section("bytes moved", moved, readable_bytes),
                *(_section("bytes sent by each device", sent, readable_bytes) if sent else []),
                *words(self.config, self.work),
                f"({CONVENTIONS})",
            ]
        )

    @property
    def title(self) -> str:
        """Model and work in one line."""
        work = self.work
        source = f" from {work.n_source:,}" if isinstance(self.config, Seq2SeqConfig | RNNConfig) else ""
        new = "" if work.new is None else f" + {work.new:,} new"
        return (
            f"{self.config.family} · {work.mode.value} · {work.batch:,}×{work.length:,}{new} tokens{source} · "
            f"{work.dtype.value} · {work.kernel.value} attention"
        )


def row_of(one: Operation, work: Workload) -> dict[str, Any]:
    """`intensity`: FLOPs a byte of the forward pass by this workload's kernel."""
    is_training = work.mode is Mode.TRAIN
    casts = sum(one.cast_bytes(work.dtype)) * one.copies
    unfused, fused = (sum(one.forward_bytes(work.dtype, fused=way)) * one.runs + casts for way in (False, True))
    back_unfused, back_fused = (
        sum(one.backward_bytes(work.dtype, fused=way)) * one.runs if is_training else 0 for way in (False, True)
    )
    moved = fused if work.kernel is Kernel.FUSED else unfused
    return {
        "part": one.part,
        "operation": one.name,
        "phase": one.phase.value,
        "runs": one.runs,
        "parameters": one.n_parameters,
        "flops": one.flops,
        "useful_flops": one.useful_flops,
        "backward_flops": one.backward_flops if is_training else 0,
        "recomputed_flops": recomputed(one, work) if is_training else 0,
        "elementwise_flops": one.elementwise_flops,
        "bytes_unfused": unfused,
        "bytes_fused": fused,
        "backward_bytes_unfused": back_unfused,
        "backward_bytes_fused": back_fused,
        "intensity": one.flops / moved if moved else 0.0,
    }


def estimate(
    config: ModelConfig | str, *, batch: int = 1, length: int | None = None, source_length: int | None = None,
    mode: Mode | str = Mode.FORWARD, new: int | None = None, predictions: int | None = None,
    dtype: Precision | str = Precision.FLOAT32, kernel: Kernel | str = Kernel.FUSED, checkpointing: bool = False,
    loss_chunk: int | None = None, accumulation: int = 1, optimizer: OptimizerKind | str = OptimizerKind.ADAMW,
    averaging: bool = False, n_devices: int = 1, sharding: Sharding | str = Sharding.DDP,
    backend: Backend | str = Backend.CUDA,
) -> Estimate:  # fmt: skip
    """The cost of one step of a config or preset; `Workload` says what each setting means, `length` is the context's.

    Nothing is allocated, whatever the size.
    """
    shape = preset(config) if isinstance(config, str) else config
    settings = {
        "batch": batch, "length": shape.context_length if length is None else length, "source_length": source_length,
        "mode": mode, "new": new, "predictions": predictions, "dtype": dtype, "kernel": kernel,
        "checkpointing": checkpointing, "loss_chunk": loss_chunk, "accumulation": accumulation,
        "optimizer": optimizer, "averaging": averaging, "n_devices": n_devices, "sharding": sharding,
        "backend": backend,
    }  # fmt: skip
    return estimate_of(shape, Workload(**settings))


def estimate_of(config: ModelConfig, work: Workload) -> Estimate:
    made = operations(config, work)
    count = parameters(config)
    update = update_of(made, count.total, work)
    return Estimate(
        config=config,
        work=work,
        operations=tuple(made),
        parameters=count,
        flops=flops_of(made, work),
        memory=memory_of(made, config, work),
        traffic=traffic_of(made, work, update),
        update=update,
        communication=communication_of(count.total, work),
    )


def _section(title: str, numbers: dict[str, int], readable: Callable[[int], str]) -> list[str]:
    width = max(len(name) for name in numbers)
    digits = max(len(f"{n:,}") for n in numbers.values())
    return [title, *(f"  {name:<{width}}  {n:>{digits},}  {readable(n)}" for name, n in numbers.items())]
