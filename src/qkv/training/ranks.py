"""Who trains: this process alone, or several that share every batch.

A batch is cut into the same parts whoever works at them, and each process takes some. Gradients are added up over all,
weighted by how many targets the whole batch has, so that the numbers do not depend on how many processes there are.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from signal import Signals
from typing import Any, TypeVar

from torch import Tensor, nn

from qkv.config import TrainingConfig
from qkv.cost.workload import Sharding
from qkv.errors import ConfigError
from qkv.models import Model
from qkv.training.objectives import Objective
from qkv.training.run import Progress, RunFolder
from qkv.training.signals import StopRequest

T = TypeVar("T")
Tensors = Mapping[str, Mapping[str, Tensor]]
Texts = Mapping[str, str]


class Ranks(ABC):
    """What the trainer asks of all processes together. Each of them must ask the same, in the same order."""

    rank: int
    world: int
    sharding: Sharding

    @property
    def is_first(self) -> bool:
        """The one that logs, draws, says and keeps the run's folder."""
        return self.rank == 0

    @property
    def label(self) -> str:
        """What is added to the machine's name: how many add up the numbers decides their last bits."""
        return "" if self.world == 1 else f", {self.world} ranks"

    def fitted(self, training: TrainingConfig) -> TrainingConfig:
        """Parts small enough that every process has one."""
        if training.batch_size < self.world:
            raise ConfigError(f"batch_size={training.batch_size} is too small to be shared by {self.world} processes")
        most = min(training.micro_batch_size, training.batch_size // self.world)
        rows = next(n for n in range(most, 0, -1) if training.batch_size % n == 0)
        return training if rows == training.micro_batch_size else training.replace(micro_batch_size=rows)

    def shared(self, items: Iterable[T]) -> Iterator[tuple[T, bool]]:
        """This process's items, and whether they count: where they do not come out even, some is done twice.

        All do equally many, for a model in pieces is whole only while all of them work at it.
        """
        rest = iter(items)
        while together := list(islice(rest, self.world)):
            yield together[min(self.rank, len(together) - 1)], self.rank < len(together)

    @abstractmethod
    def share(self, model: nn.Module, objective: Objective) -> Objective:
        """The objective, whose gradients will be the average over all processes; before any optimizer is made."""

    @abstractmethod
    def summed(self, numbers: Tensor) -> Tensor: ...

    @abstractmethod
    def of_first(self, number: Callable[[], int | float]) -> float:
        """The first process asks; all know its answer."""

    @abstractmethod
    def texts(self, text: str) -> list[str]:
        """Each one's, in order."""

    @abstractmethod
    def any_rank_stopping(self, stop: StopRequest) -> Signals | None:
        """Which signal any of them has received."""

    @abstractmethod
    def wait(self) -> None:
        """For all the others."""

    @abstractmethod
    def examined(self, model: Model, examine: Callable[[Model], Mapping[str, Any]]) -> Mapping[str, Any]:
        """What the first finds, by itself; the others find nothing."""

    @abstractmethod
    def save(self, run: RunFolder, progress: Progress, *, tensors: Tensors, texts: Texts) -> None: ...


class Alone(Ranks):
    """One process: nobody to ask."""

    rank, world, sharding = 0, 1, Sharding.DDP

    def share(self, model: nn.Module, objective: Objective) -> Objective:  # noqa: ARG002
        return objective

    def summed(self, numbers: Tensor) -> Tensor:
        return numbers

    def of_first(self, number: Callable[[], int | float]) -> float:
        return float(number())

    def texts(self, text: str) -> list[str]:
        return [text]

    def any_rank_stopping(self, stop: StopRequest) -> Signals | None:
        return stop.signal

    def wait(self) -> None:
        pass

    def examined(self, model: Model, examine: Callable[[Model], Mapping[str, Any]]) -> Mapping[str, Any]:
        return examine(model)

    def save(self, run: RunFolder, progress: Progress, *, tensors: Tensors, texts: Texts) -> None:
        run.save(progress, tensors=tensors, texts=texts)


ALONE = Alone()


def is_under_torchrun() -> bool:
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
