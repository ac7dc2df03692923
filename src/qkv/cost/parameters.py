"""How many parameters a model has, and where. Tied tensors count once."""

from dataclasses import dataclass

from qkv.config import ModelConfig
from qkv.cost.operation import Operation
from qkv.cost.operations import operations
from qkv.cost.workload import Workload


@dataclass(frozen=True)
class Parameters:
    """By part; a part is named as in the model, all layers together."""

    by_part: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_part.values())

    def of(self, word: str) -> int:
        """All parts with that word in their name: `attention`, `feedforward`, `decoder`, `cross`."""
        return sum(count for part, count in self.by_part.items() if word in part.split("."))

    def as_dict(self) -> dict[str, int]:
        return {**self.by_part, "total": self.total}


def parameters(config: ModelConfig) -> Parameters:
    """Counted from the config: nothing is allocated, whatever its size."""
    return parameters_of(operations(config, Workload(batch=1, length=1)))


def parameters_of(made: list[Operation]) -> Parameters:
    by_part: dict[str, int] = {}
    for operation in made:
        if operation.parameters:
            by_part[operation.part] = by_part.get(operation.part, 0) + operation.n_parameters
    return Parameters(by_part)
