"""Training steps: compute the gradients of a batch and update the weights."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from qkv.choices import BackendName
from qkv.config import TrainingConfig
from qkv.engines import accelerated, select_training_backend
from qkv.training.checkpoint import full_tensor, is_sharded, to_local
from qkv.training.distributed import SINGLE_PROCESS, Distributed, IsCounted
from qkv.training.objectives import LossOutput, Objective, TrainingBatch
from qkv.training.optimizer import build_optimizers, clip_gradients, set_learning_rate

BatchT = TypeVar("BatchT", bound=TrainingBatch)


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """The loss, gradient norm and metrics of one training step, as Python numbers."""

    loss: float
    """Mean loss per target."""
    grad_norm: float
    """Global gradient norm before clipping."""
    metrics: dict[str, float]

    is_ready = True

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def read(self) -> "StepMetrics":
        return self

    def to_log_entry(self) -> dict[str, float]:
        return {"loss": self.loss, **self.metrics, "grad_norm": self.grad_norm}


@runtime_checkable
class StepResult(Protocol):
    """The metrics of a step, which may not be known yet when the step returns."""

    @property
    def is_ready(self) -> bool:
        """False if the metrics should be read only after the next step has started."""
        ...

    def read(self) -> StepMetrics:
        """Wait for the metrics and return them. Raises `StepError` if the loss or the gradient is not finite."""
        ...


class StepError(Exception):
    """An error that occurred before the update of a step."""

    def __init__(self, reason: str, step: int) -> None:
        super().__init__(reason)
        self.step = step


@runtime_checkable
class TrainStep(Protocol):
    """One training step: loss, backward pass, clipping and optimizer update."""

    model: nn.Module
    config: TrainingConfig
    distributed: Distributed
    objective: Objective
    optimizers: list[Optimizer]
    modules: AbstractContextManager[object]
    """Context in which the model runs with faster modules. The trainer enters it once for a whole run, because
    replacing the modules in every step takes time."""

    def load(self, batch: TrainingBatch) -> TrainingBatch:
        """Prepare a batch for the step. This method is called in another thread, before the step."""
        ...

    def __call__(self, batch: TrainingBatch, step: int, *, learning_rate: float) -> StepResult:
        """Update the weights with the gradients of a batch.

        The result depends only on the weights, the batch and the number of the step. Raises `StepError` instead of
        applying an update that is not finite.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """The loss, gradient norm and metrics of one training step, as tensors on the device."""

    metric_names: tuple[str, ...]
    """Metric names, in the same order as in `values`."""
    grad_norm: Float[Tensor, ""]
    """Global gradient norm before clipping."""
    values: Float[Tensor, " value"]
    """Gradient norm and loss, followed by the total and count of each metric. Using a single tensor requires only one
    copy."""

    def to_metrics(self, values: Float[Tensor, " value"]) -> StepMetrics:
        """Convert a copy of `values` to Python numbers."""
        grad_norm, loss, *sums = values.tolist()
        pairs = zip(self.metric_names, sums[::2], sums[1::2], strict=True)
        return StepMetrics(
            loss=loss, grad_norm=grad_norm, metrics={name: total / max(count, 1.0) for name, total, count in pairs}
        )


class EagerStep:
    """The reference training step, which all other training steps must agree with."""

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
        """Create the step and the optimizers.

        `objective` must already be wrapped by `distributed`. For `capturable`, see `build_optimizers`.
        """
        self.model = model
        self.config = config
        self.objective = objective
        self.modules = nullcontext() if modules is None else modules
        self.distributed = distributed
        self.optimizers = build_optimizers(model, config, capturable=capturable)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def load(self, batch: TrainingBatch) -> TrainingBatch:
        return batch

    def __call__(self, batch: TrainingBatch, step: int, *, learning_rate: float) -> StepResult:
        self.set_learning_rate(learning_rate)
        with self.modules:
            output = self.compute_gradients(batch, step)
        metrics = output.to_metrics(output.values)
        # Checked before the update so that non-finite values do not change the weights.
        if not metrics.is_finite:
            self.raise_nonfinite(metrics, batch, step)
        self.clip_and_update(output.grad_norm)
        return metrics

    def set_learning_rate(self, learning_rate: float) -> None:
        for optimizer in self.optimizers:
            set_learning_rate(optimizer, learning_rate)

    def compute_gradients(self, batch: TrainingBatch, step: int) -> StepOutput:
        """Compute the loss and the gradients of a batch, one micro-batch at a time."""
        if batch.n_targets == 0:
            raise StepError("a batch must have at least 1 target, got 0", step)
        return self.accumulate_gradients(self.micro_batch_losses(batch, step), batch.n_targets)

    def micro_batch_losses(self, batch: TrainingBatch, step: int) -> Iterator[tuple[LossOutput, IsCounted]]:
        """Yield the loss of each of this rank's micro-batches with a flag that is True if the micro-batch counts."""
        for (i, micro_batch), counts in self.distributed.shard_with_uncounted_repeats(
            enumerate(batch.split(self.config.micro_batch_size))
        ):
            self.seed_dropout(step, micro_batch=i)
            yield self.objective(micro_batch), counts

    def seed_dropout(self, step: int, *, micro_batch: int = 0) -> None:
        """Seed dropout from (seed, step, micro-batch) so that checkpoints do not need to store the random state."""
        torch.manual_seed((self.config.seed * 1_000_003 + step) * 1_009 + micro_batch)

    def accumulate_gradients(
        self, outputs: Iterable[tuple[LossOutput, IsCounted]], n_targets: int | Tensor
    ) -> StepOutput:
        """See the function `accumulate_gradients`."""
        return accumulate_gradients(outputs, n_targets, parameters=self.parameters, distributed=self.distributed)

    def raise_nonfinite(self, metrics: StepMetrics, batch: TrainingBatch, step: int) -> NoReturn:
        """Raise `StepError` with the name of the first non-finite tensor of a step.

        The gradients of the step must still be present.
        """
        with self.modules:
            culprit = describe_first_nonfinite_tensor(
                self.model, lambda: (output.loss for output, _ in self.micro_batch_losses(batch, step))
            )
        # Non-finite gradients spread to all ranks. The rank whose micro-batch caused them finds an earlier non-finite
        # tensor.
        culprit = next((name for name in self.distributed.all_gather_str(culprit) if "gradient" not in name), culprit)
        raise StepError(f"loss {metrics.loss}: {culprit} is not finite", step)

    def clip_and_update(self, grad_norm: Float[Tensor, ""]) -> None:
        """Clip the gradients, update the weights and free the gradients."""
        for optimizer in self.optimizers:
            if self.config.max_grad_norm is not None:
                clip_gradients(optimizer, grad_norm, self.config.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def build_train_step(
    model: nn.Module,
    config: TrainingConfig,
    create_objective: Callable[[], Objective],
    *,
    distributed: Distributed = SINGLE_PROCESS,
    backend: str = BackendName.AUTO,
) -> TrainStep:
    """Return the training step of a backend, or of the fastest one that supports the model.

    `create_objective` is called with the faster modules in place, because an objective may compile them.
    """
    selected = select_training_backend(model, config, backend).name
    modules = nullcontext() if selected == BackendName.EAGER else accelerated(model, "train")
    with modules:
        objective = distributed.wrap_objective(model, create_objective())
    # AdamW in PyTorch cannot skip the updates of sharded tensors, which the asynchronous step requires.
    if selected == BackendName.CUDA and not any(map(is_sharded, model.parameters())):
        from qkv.training.cuda_step import build_cuda_step

        return build_cuda_step(model, config, objective, modules=modules, distributed=distributed)
    return EagerStep(model, config, objective, modules=modules, distributed=distributed)


def accumulate_gradients(
    counted_outputs: Iterable[tuple[LossOutput, IsCounted]],
    n_targets: int | Tensor,
    *,
    parameters: Sequence[nn.Parameter],
    distributed: Distributed,
) -> StepOutput:
    """Run the backward pass of every micro-batch and return the loss, gradient norm and metrics of the full batch.

    `counted_outputs` yields the loss of each micro-batch and a flag that is True if the micro-batch counts.
    Micro-batches that are repeated only to keep the ranks in step (see `Distributed.shard_with_uncounted_repeats`) do
    not count. `n_targets` is the number of targets in the full batch over all ranks. This function does not synchronize
    with the device.
    """
    loss = torch.zeros((), device=parameters[0].device)
    sums: dict[str, Tensor] = {}
    for output, counts in counted_outputs:
        # Each loss is divided by the number of targets in the full batch so that the micro-batch gradients add up to
        # the gradient of the full batch, even if micro-batches have different numbers of targets. The factor world_size
        # is needed because DDP and FSDP average gradients over ranks.
        mean_loss, weight = output.loss / n_targets, distributed.world_size * counts
        (mean_loss if weight == 1 else weight * mean_loss).backward()
        loss += mean_loss.detach() if counts else 0.0
        for name, metric in output.metrics.items():
            total_and_count = torch.stack((metric.total.detach().float(), metric.count.detach().float()))
            total_and_count = total_and_count if counts else torch.zeros_like(total_and_count)
            sums[name] = sums[name] + total_and_count if name in sums else total_and_count
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    grad_norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    summed = distributed.all_reduce_sum(torch.cat((loss[None], *sums.values())))
    return StepOutput(
        values=torch.cat((full_tensor(grad_norm).float()[None], summed)), grad_norm=grad_norm, metric_names=tuple(sums)
    )


def describe_nonfinite_weight(model: nn.Module) -> str | None:
    """Return the name of the first weight that contains a NaN or infinite value, or None if all weights are finite."""
    named_parameters = list(model.named_parameters())
    finite = torch.stack([to_local(parameter.detach()).isfinite().all() for _, parameter in named_parameters]).tolist()
    return next(
        (f"weight {name}" for (name, _), is_finite in zip(named_parameters, finite, strict=True) if not is_finite), None
    )


def describe_first_nonfinite_tensor(model: nn.Module, compute_losses: Callable[[], Iterable[Tensor]]) -> str:
    """Describe the first non-finite tensor of a step: a weight, a module output, the loss or a gradient.

    The tensors are checked in the order in which a step computes them. `compute_losses` recomputes the losses of the
    step.
    """
    return (
        describe_nonfinite_weight(model)
        or _describe_first_nonfinite_output(model, compute_losses)
        or _describe_last_nonfinite_gradient(model)
        or "the gradient norm"
    )


def _describe_first_nonfinite_output(model: nn.Module, compute_losses: Callable[[], Iterable[Tensor]]) -> str | None:
    nonfinite: list[str] = []

    def check(name: str, output: object) -> None:
        if isinstance(output, tuple):
            for element in output:
                check(name, element)
            return
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return
        # Masked attention scores are −∞ by design.
        is_valid = output.isfinite() | (output == -torch.inf) if name.endswith(".scores") else output.isfinite()
        if not is_valid.all():
            nonfinite.append(name)

    # The forward hooks of submodules run before the hooks of the modules that contain them.
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output, name=name: check(f"the output of {name}", output))
        for name, module in model.named_modules()
        if name
    ]
    try:
        with torch.no_grad():
            for loss in compute_losses():
                check("the loss", loss)
    finally:
        for hook in hooks:
            hook.remove()
    return nonfinite[0] if nonfinite else None


def _describe_last_nonfinite_gradient(model: nn.Module) -> str | None:
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None and not to_local(parameter.grad).isfinite().all():
            return f"the gradient of {name}"
    return None
