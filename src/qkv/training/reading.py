"""When is a step's loss read? A CPU's at once; a GPU's while it works at the next step, so that it never waits."""

from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.training.objectives import TrainingBatch

AnyBatch = TypeVar("AnyBatch", bound=TrainingBatch)


@dataclass(frozen=True, kw_only=True)
class Known:
    """A step's numbers."""

    loss: float
    """A target."""
    norm: float
    """Of the gradients, before clipping."""
    measures: dict[str, float]

    def logged(self) -> dict[str, float]:
        return {"loss": self.loss, **self.measures, "gradient_norm": self.norm}


@dataclass(frozen=True, kw_only=True)
class Made:
    """A step's numbers where they were made."""

    names: tuple[str, ...]
    """Of the measures."""
    norm: Float[Tensor, ""]
    """Of the gradients."""
    numbers: Float[Tensor, " number"]
    """Norm and loss, then of each measure its total and its count."""


@dataclass(frozen=True, kw_only=True)
class Unread:
    """A step's numbers on their way from the device."""

    batch: TrainingBatch
    step: int
    made: Made
    numbers: Float[Tensor, " number"]
    """On the CPU, and true once `arrived`."""
    arrived: torch.cuda.Event | None

    def read(self) -> Known:
        if self.arrived is not None:
            self.arrived.synchronize()
        norm, loss, *measured = self.numbers.tolist()
        pairs = zip(self.made.names, measured[::2], measured[1::2], strict=True)
        return Known(loss=loss, norm=norm, measures={name: total / max(n, 1.0) for name, total, n in pairs})


def sent(made: Made, batch: TrainingBatch, step: int) -> Unread:
    """Off they go; nobody waits for them here."""
    here, arrived = made.numbers.to("cpu", non_blocking=True), None
    if made.numbers.is_cuda:
        arrived = torch.cuda.Event()
        arrived.record()
    return Unread(batch=batch, step=step, made=made, numbers=here, arrived=arrived)


def pinned(batch: AnyBatch) -> AnyBatch:
    """In memory from which a GPU copies by itself; for a copy from elsewhere, all it was given is finished first."""
    held = {name: value.pin_memory() for name, value in vars(batch).items() if isinstance(value, Tensor)}
    return cast(AnyBatch, replace(cast(Any, batch), **held))
