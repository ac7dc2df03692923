"""Asynchronous transfer of step metrics from the GPU to the host.

If the loss were read right after a step, the GPU would have to wait for the host before starting the next step.
Instead, the copy is queued on the stream, and its result is read while the next step runs.
"""

from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.training.objectives import TrainingBatch

BatchT = TypeVar("BatchT", bound=TrainingBatch)


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """The loss, gradient norm and metrics of one training step, as Python numbers."""

    loss: float
    """Mean loss per target."""
    grad_norm: float
    """Global gradient norm before clipping."""
    metrics: dict[str, float]

    def to_log_entry(self) -> dict[str, float]:
        return {"loss": self.loss, **self.metrics, "grad_norm": self.grad_norm}


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """The result of one training step, stored on the device."""

    metric_names: tuple[str, ...]
    """Metric names, in the same order as in `values`."""
    grad_norm: Float[Tensor, ""]
    """Global gradient norm before clipping."""
    values: Float[Tensor, " value"]
    """Gradient norm and loss, followed by the total and count of each metric. Using a single tensor requires only one
    copy."""


@dataclass(frozen=True, kw_only=True)
class PendingMetrics:
    """The metrics of a step, which may still be in transfer to the host."""

    batch: TrainingBatch
    step: int
    output: StepOutput
    host_values: Float[Tensor, " value"]
    """A CPU tensor that becomes valid when `copy_done` has been reached."""
    copy_done: torch.cuda.Event | None

    def read(self) -> StepMetrics:
        if self.copy_done is not None:
            self.copy_done.synchronize()
        grad_norm, loss, *sums = self.host_values.tolist()
        pairs = zip(self.output.metric_names, sums[::2], sums[1::2], strict=True)
        return StepMetrics(
            loss=loss, grad_norm=grad_norm, metrics={name: total / max(count, 1.0) for name, total, count in pairs}
        )


def copy_to_host_async(output: StepOutput, batch: TrainingBatch, step: int) -> PendingMetrics:
    """Start an asynchronous copy to the host without synchronizing."""
    host_values, copy_done = output.values.to("cpu", non_blocking=True), None
    if output.values.is_cuda:
        copy_done = torch.cuda.Event()
        copy_done.record()
    return PendingMetrics(batch=batch, step=step, output=output, host_values=host_values, copy_done=copy_done)


def pin_batch(batch: BatchT) -> BatchT:
    """Return the batch with its tensors in pinned memory.

    A copy from pageable memory would first synchronize with the GPU, even with `non_blocking=True`.
    """
    pinned = {name: value.pin_memory() for name, value in vars(batch).items() if isinstance(value, Tensor)}
    return cast(BatchT, replace(cast(Any, batch), **pinned))
