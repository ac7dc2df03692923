"""Count the parameters in each part of a model from its config. Tied tensors are counted once."""

from dataclasses import dataclass

from qkv.config import ModelConfig
from qkv.cost.operation import Operation
from qkv.cost.operations import list_operations
from qkv.cost.workload import Workload


@dataclass(frozen=True)
class ParameterCounts:
    """The number of parameters in each part of a model.

    Parts are named like the modules of the model, without layer indices.
    """

    by_part: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_part.values())

    def count_matching(self, name: str) -> int:
        """Count the parameters of all parts whose path contains this name, such as `attention` or `decoder`."""
        return sum(count for part, count in self.by_part.items() if name in part.split("."))

    def as_dict(self) -> dict[str, int]:
        return {**self.by_part, "total": self.total}


def count_parameters(config: ModelConfig) -> ParameterCounts:
    """Count the parameters of a model without allocating them."""
    return group_parameters_by_part(list_operations(config, Workload(batch_size=1, seq_len=1)))


def group_parameters_by_part(operations: list[Operation]) -> ParameterCounts:
    """Sum the parameters of all operations in each part of the model."""
    by_part: dict[str, int] = {}
    for op in operations:
        if op.parameters:
            by_part[op.part] = by_part.get(op.part, 0) + op.n_parameters
    return ParameterCounts(by_part)
