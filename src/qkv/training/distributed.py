"""Stop signals and the distributed context of a training run, with an implementation for a single process.

A batch is split into the same micro-batches for any number of processes, and each process handles some of them.
Gradients are summed over all processes and divided by the number of targets in the full batch. The results therefore do
not depend on the number of processes, except for rounding differences.

Inside the training loop, the first SIGINT or SIGTERM ends the run after the current step. Outside the training loop, it
raises `SignalInterrupt`. A second signal always kills the process. Exit codes follow the shell convention: 130 for
SIGINT (Ctrl-C) and 143 for SIGTERM.
"""

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from signal import Signals
from types import FrameType
from typing import Any, TypeVar

from torch import Tensor, nn

from qkv.config import TrainingConfig
from qkv.cost.workload import Sharding
from qkv.errors import ConfigError
from qkv.models import Model
from qkv.training.checkpoint import RunFolder, TrainingProgress
from qkv.training.objectives import Objective

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class SignalInterrupt(KeyboardInterrupt):
    """Raised when a stop signal arrives outside the training loop."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        super().__init__(self.signal.name)


class StopRequest:
    """A record of the stop signal that was received, if any."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def receive(self, number: int, _frame: FrameType | None) -> None:
        _restore_default_handlers()
        self.signal = signal.Signals(number)


@contextmanager
def record_stop_signals() -> Iterator[StopRequest]:
    """Record stop signals in the yielded `StopRequest` while the context is active.

    The signals have no other effect.
    """
    request = StopRequest()
    with _temporary_stop_signal_handler(request.receive):
        yield request


@contextmanager
def raise_on_stop_signals() -> Iterator[None]:
    """Raise `SignalInterrupt` when a stop signal arrives while the context is active."""

    def receive(number: int, _frame: FrameType | None) -> None:
        _restore_default_handlers()
        raise SignalInterrupt(number)

    with _temporary_stop_signal_handler(receive):
        yield


@contextmanager
def _temporary_stop_signal_handler(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    previous = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, old_handler in previous.items():
            signal.signal(number, old_handler)


def _restore_default_handlers() -> None:
    # The operating system's default handler works even during a long native call.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


T = TypeVar("T")
Tensors = Mapping[str, Mapping[str, Tensor]]
Texts = Mapping[str, str]
IsCounted = bool
"""False for an item that another rank also processes and that must not be counted twice."""


class Distributed(ABC):
    """The collective operations of a training run. Every process must call them in the same order."""

    rank: int
    world_size: int
    sharding: Sharding

    @property
    def is_main_process(self) -> bool:
        """True on rank 0, which writes the run folder, logs metrics and shows progress."""
        return self.rank == 0

    @property
    def environment_suffix(self) -> str:
        """Suffix for the environment description. The suffix is needed because the world size affects rounding."""
        return "" if self.world_size == 1 else f", {self.world_size} ranks"

    def shrink_micro_batch_to_fill_ranks(self, training: TrainingConfig) -> TrainingConfig:
        """Return the config with a micro-batch size that gives every process at least one micro-batch."""
        self._check_supported(training)
        if training.batch_size < self.world_size:
            raise ConfigError(
                f"batch_size must be at least the number of processes ({self.world_size}), got {training.batch_size}"
            )
        max_rows = min(training.micro_batch_size, training.batch_size // self.world_size)
        rows = next(n for n in range(max_rows, 0, -1) if training.batch_size % n == 0)
        return training if rows == training.micro_batch_size else training.replace(micro_batch_size=rows)

    def _check_supported(self, training: TrainingConfig) -> None:  # noqa: B027 - most kinds support every config
        """Raise `ConfigError` if this kind of sharding does not support the config."""

    def shard_with_uncounted_repeats(self, items: Iterable[T]) -> Iterator[tuple[T, IsCounted]]:
        """Yield each of this rank's items with a flag that is True if the item counts.

        All ranks process the same number of items because FSDP gathers weights collectively. If the items cannot be
        divided evenly, some ranks repeat an item that another rank also processes. The repeated item does not count.
        """
        remaining = iter(items)
        while group := list(islice(remaining, self.world_size)):
            yield group[min(self.rank, len(group) - 1)], self.rank < len(group)

    @abstractmethod
    def wrap_objective(self, model: nn.Module, objective: Objective) -> Objective:
        """Return the objective with gradients averaged over all ranks.

        Call this method before the optimizers are created.
        """

    @abstractmethod
    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over all ranks. `values` may be modified in place."""

    @abstractmethod
    def broadcast_from_rank0(self, compute: Callable[[], int | float]) -> float:
        """Call `compute` on rank 0 only and return its result on every rank."""

    @abstractmethod
    def all_gather_str(self, text: str) -> list[str]:
        """Return the strings from all ranks in rank order."""

    @abstractmethod
    def synchronize_stop_request(self, stop: StopRequest) -> Signals | None:
        """Set `stop.signal` on all ranks if any rank has received a stop signal, and return the signal or None."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank has called this method."""

    @abstractmethod
    def gather_and_evaluate_on_rank0(
        self, model: Model, compute_metrics: Callable[[Model], Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        """Return `compute_metrics(model)` on rank 0 and an empty mapping on the other ranks."""

    @abstractmethod
    def save_checkpoint(self, run: RunFolder, progress: TrainingProgress, *, tensors: Tensors, texts: Texts) -> None:
        """Write a checkpoint to the run folder. Every rank must call this method."""


class SingleProcess(Distributed):
    """A training run in a single process, for which every collective operation is trivial."""

    rank, world_size, sharding = 0, 1, Sharding.DDP

    def wrap_objective(self, model: nn.Module, objective: Objective) -> Objective:  # noqa: ARG002
        return objective

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        return values

    def broadcast_from_rank0(self, compute: Callable[[], int | float]) -> float:
        return float(compute())

    def all_gather_str(self, text: str) -> list[str]:
        return [text]

    def synchronize_stop_request(self, stop: StopRequest) -> Signals | None:
        return stop.signal

    def barrier(self) -> None:
        pass

    def gather_and_evaluate_on_rank0(
        self, model: Model, compute_metrics: Callable[[Model], Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        return compute_metrics(model)

    def save_checkpoint(self, run: RunFolder, progress: TrainingProgress, *, tensors: Tensors, texts: Texts) -> None:
        run.save(progress, tensors=tensors, texts=texts)


SINGLE_PROCESS = SingleProcess()


def is_launched_by_torchrun() -> bool:
    """Return True if the environment variables set by torchrun are present."""
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
