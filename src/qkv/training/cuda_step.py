"""Training steps for GPUs, which run without waiting for the host and can be captured in a CUDA graph.

If the loss were read right after a step, the GPU would have to wait for the host before starting the next step.
Instead, the copy of the metrics is queued on the stream, and its result is read while the next step runs.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv.config import TrainingConfig
from qkv.engines import CUDAGraphStep
from qkv.training.distributed import SINGLE_PROCESS, Distributed, IsCounted
from qkv.training.objectives import DeviceInputs, LossOutput, Objective, SplitObjective, TrainingBatch
from qkv.training.optimizer import clip_gradients, skip_step_if
from qkv.training.step import BatchT, EagerStep, StepError, StepMetrics, StepOutput, StepResult


class AsyncStep(EagerStep):
    """Training step whose metrics are read one step late.

    After a non-finite loss, the device skips all later updates by itself, because the host notices it too late.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainingConfig,
        objective: Objective,
        *,
        modules: AbstractContextManager[object] | None = None,
        distributed: Distributed = SINGLE_PROCESS,
        capturable: bool = False,
    ) -> None:
        super().__init__(model, config, objective, modules=modules, distributed=distributed, capturable=capturable)
        self._capturable = capturable
        self._found_nonfinite = torch.zeros((), device=self.parameters[0].device)
        """Tensor that is set to 1 at the first non-finite loss."""

    def load(self, batch: TrainingBatch) -> TrainingBatch:
        return pin_batch(batch)

    def __call__(self, batch: TrainingBatch, step: int, *, learning_rate: float) -> StepResult:
        self.set_learning_rate(learning_rate)
        with self.modules:
            output = self.compute_gradients(batch, step)
        self.clip_and_update(output.grad_norm)
        return PendingMetrics.copy_to_host_async(self, output, batch, step)

    def accumulate_gradients(
        self, outputs: Iterable[tuple[LossOutput, IsCounted]], n_targets: int | Tensor
    ) -> StepOutput:
        output = super().accumulate_gradients(outputs, n_targets)
        is_nonfinite = output.values[:2].isfinite().all().logical_not().float()
        torch.maximum(self._found_nonfinite, is_nonfinite, out=self._found_nonfinite)
        return output

    def clip_and_update(self, grad_norm: Float[Tensor, ""]) -> None:
        for optimizer in self.optimizers:
            if self.config.max_grad_norm is not None:
                clip_gradients(optimizer, grad_norm, self.config.max_grad_norm, fuse_into_step=self._capturable)
            skip_step_if(self._found_nonfinite, optimizer)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def recompute_gradients(self, batch: TrainingBatch, step: int) -> None:
        """Recompute the gradients of the first step with a non-finite loss, which were freed by the update.

        The weights are still those of this step because the device skipped all later updates.
        """
        with self.modules:
            self.compute_gradients(batch, step)


class CapturedStep(AsyncStep):
    """Asynchronous training step that is captured in a CUDA graph once the shapes of its inputs repeat."""

    def __init__(
        self,
        model: nn.Module,
        config: TrainingConfig,
        objective: SplitObjective,
        *,
        modules: AbstractContextManager[object] | None = None,
        graph_step: CUDAGraphStep[StepOutput] | None = None,
    ) -> None:
        """Create the step. `graph_step` captures and replays it; tests replace the capture."""
        super().__init__(model, config, objective, modules=modules, capturable=True)
        self._split_objective = objective
        self._graph_step = CUDAGraphStep[StepOutput]() if graph_step is None else graph_step

    def __call__(self, batch: TrainingBatch, step: int, *, learning_rate: float) -> StepResult:
        if batch.n_targets == 0:
            raise StepError("a batch must have at least 1 target, got 0", step)
        self.set_learning_rate(learning_rate)
        self.seed_dropout(step)
        tensors = self._split_objective.to_device(batch)
        n_targets = torch.full((), float(batch.n_targets), device=self.parameters[0].device)
        with self.modules:
            output = self._graph_step((*tensors, n_targets), self._compute_gradients_and_update)
        return PendingMetrics.copy_to_host_async(self, output, batch, step)

    def _compute_gradients_and_update(self, inputs: DeviceInputs) -> StepOutput:
        """Run the part of the step that is captured."""
        *tensors, n_targets = inputs
        assert n_targets is not None
        output = self.accumulate_gradients([(self._split_objective.loss(*tensors), True)], n_targets)
        self.clip_and_update(output.grad_norm)
        return output


@dataclass(frozen=True, kw_only=True)
class PendingMetrics:
    """The metrics of a step, which may still be in transfer to the host."""

    train_step: AsyncStep
    batch: TrainingBatch
    step: int
    output: StepOutput
    host_values: Float[Tensor, " value"]
    """A CPU tensor that becomes valid when `copy_done` has been reached."""
    copy_done: torch.cuda.Event | None

    is_ready = False

    @classmethod
    def copy_to_host_async(
        cls, train_step: AsyncStep, output: StepOutput, batch: TrainingBatch, step: int
    ) -> "PendingMetrics":
        """Start an asynchronous copy to the host without synchronizing."""
        host_values, copy_done = output.values.to("cpu", non_blocking=True), None
        if output.values.is_cuda:
            copy_done = torch.cuda.Event()
            copy_done.record()
        return cls(
            train_step=train_step, batch=batch, step=step, output=output, host_values=host_values, copy_done=copy_done
        )

    def read(self) -> StepMetrics:
        if self.copy_done is not None:
            self.copy_done.synchronize()
        metrics = self.output.to_metrics(self.host_values)
        if not metrics.is_finite:
            self.train_step.recompute_gradients(self.batch, self.step)
            self.train_step.raise_nonfinite(metrics, self.batch, self.step)
        return metrics


def build_cuda_step(
    model: nn.Module,
    config: TrainingConfig,
    objective: Objective,
    *,
    modules: AbstractContextManager[object],
    distributed: Distributed,
) -> AsyncStep:
    """Return the captured step if the step can be captured, and otherwise the asynchronous step."""
    if can_capture(objective, config):
        return CapturedStep(model, config, cast(SplitObjective, objective), modules=modules)
    return AsyncStep(model, config, objective, modules=modules, distributed=distributed)


def can_capture(objective: Objective, config: TrainingConfig) -> bool:
    """Return True if training steps can be captured in a CUDA graph.

    Capturing requires a compiled model, a single process and one micro-batch per batch. With several processes, the
    objective is wrapped and is no longer a `SplitObjective`. With several micro-batches, the second one would have to
    add to the gradients of the first, but these have already been freed after its capture.
    """
    has_one_micro_batch = config.micro_batch_size == config.batch_size
    is_capturable = has_one_micro_batch and config.compile and not config.activation_checkpointing
    return is_capturable and isinstance(objective, SplitObjective)


def pin_batch(batch: BatchT) -> BatchT:
    """Return the batch with its tensors in pinned memory.

    A copy from pageable memory would first synchronize with the GPU, even with `non_blocking=True`.
    """
    pinned = {name: value.pin_memory() for name, value in vars(batch).items() if isinstance(value, Tensor)}
    return cast(BatchT, replace(cast(Any, batch), **pinned))
