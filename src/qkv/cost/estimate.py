"""What a step of a model costs, before it is spent: parameters, FLOPs and bytes from the config alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qkv.choices import Kernel
from qkv.config import ModelConfig, RNNConfig, Seq2SeqConfig
from qkv.cost.flops import Flops, flops_of, recomputed
from qkv.cost.launch import Launch, launches
from qkv.cost.memory import Memory, Traffic, memory_of, traffic_of
from qkv.cost.operation import Operation
from qkv.cost.operations import operations
from qkv.cost.parameters import Parameters, parameters
from qkv.cost.readable import readable_bytes, readable_flops
from qkv.cost.workload import Mode, Precision, Workload

CONVENTIONS = (
    "FLOP = 2 × multiply–add, matrix products alone; useful = what the mask lets count; tied tensors count once; "
    "bytes moved are the forward pass's"
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

    @property
    def launches(self) -> list[Launch]:
        """The kernels of the step, in order of phase: what a time is made from."""
        return launches(self.operations, self.work)

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
            "intensity": self.intensity,
            "conventions": CONVENTIONS,
        }

    def rows(self) -> list[dict[str, Any]]:
        """One flat dict an operation, all its runs together: a DataFrame takes it as it is."""
        size = self.work.dtype.narrow
        is_training = self.work.mode is Mode.TRAIN
        return [
            {
                "part": one.part,
                "operation": one.name,
                "runs": one.runs,
                "parameters": one.n_parameters,
                "flops": one.flops,
                "useful_flops": one.useful_flops,
                "backward_flops": one.backward_flops if is_training else 0,
                "recomputed_flops": recomputed(one, self.work) if is_training else 0,
                "elementwise_flops": one.elementwise_flops,
                "bytes_unfused": one.moved(fused=False) * size,
                "bytes_fused": one.moved(fused=True) * size,
            }
            for one in self.operations
        ]

    def __repr__(self) -> str:
        held = {name: n for name, n in self.memory.as_dict().items() if n}
        moved = {name: n for name, n in self.traffic.as_dict().items() if n}
        computed = {name: n for name, n in self.flops.as_dict().items() if n}
        return "\n".join(
            [
                self._title(),
                *_section("parameters", self.parameters.as_dict(), None),
                *_section("FLOPs", computed, readable_flops),
                *_section("bytes held", held, readable_bytes),
                *_section("bytes moved", moved, readable_bytes),
                f"({CONVENTIONS})",
            ]
        )

    def _title(self) -> str:
        work = self.work
        source = f" from {work.n_source:,}" if isinstance(self.config, Seq2SeqConfig | RNNConfig) else ""
        return (
            f"{self.config.family} · {work.mode.value} · {work.batch:,}×{work.length:,} tokens{source} · "
            f"{work.dtype.value} · {work.kernel.value} attention"
        )


def estimate(
    config: ModelConfig, *, batch: int, length: int, source_length: int | None = None,
    mode: Mode | str = Mode.TRAIN, dtype: Precision | str = Precision.FLOAT32, kernel: Kernel | str = Kernel.FUSED,
    checkpointing: bool = False, loss_chunk: int | None = None, accumulation: int = 1,
) -> Estimate:  # fmt: skip
    """The cost of one step; `Workload` says what each setting means. Nothing is allocated, whatever the size."""
    settings = {
        "batch": batch, "length": length, "source_length": source_length, "mode": mode, "dtype": dtype,
        "kernel": kernel, "checkpointing": checkpointing, "loss_chunk": loss_chunk, "accumulation": accumulation,
    }  # fmt: skip
    return estimate_of(config, Workload(**settings))


def estimate_of(config: ModelConfig, work: Workload) -> Estimate:
    made = operations(config, work)
    return Estimate(
        config=config,
        work=work,
        operations=tuple(made),
        parameters=parameters(config),
        flops=flops_of(made, work),
        memory=memory_of(made, config, work),
        traffic=traffic_of(made, work),
    )


def _section(title: str, numbers: dict[str, int], readable: Callable[[int], str] | None) -> list[str]:
    width = max(len(name) for name in numbers)
    digits = max(len(f"{n:,}") for n in numbers.values())
    lines = [
        f"  {name:<{width}}  {n:>{digits},}" + (f"  {readable(n)}" if readable else "") for name, n in numbers.items()
    ]
    return [title, *lines]
