"""Evaluate a model on held-out batches."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from qkv.errors import ConfigError
from qkv.training.distributed import SINGLE_PROCESS, Distributed
from qkv.training.objectives import Objective, TrainingBatch
from qkv.training.run_folder import TrainingProgress


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The summed loss over the evaluated targets and, if known, the number of text bytes that they represent."""

    loss_sum: float
    n_targets: int
    n_bytes: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Additional metrics from the objective, keyed by name."""

    @property
    def loss(self) -> float:
        """Mean loss in nats per target."""
        return self.loss_sum / self.n_targets

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float | None:
        return None if self.n_bytes is None else self.loss_sum / math.log(2) / self.n_bytes


@torch.no_grad()
def evaluate(
    model: nn.Module,
    objective: Objective,
    batches: Iterable[TrainingBatch],
    *,
    distributed: Distributed = SINGLE_PROCESS,
) -> EvaluationResult:
    """Evaluate the model on all batches without computing gradients.

    Losses and metrics are summed over all batches and divided by the total counts because averaging the batch averages
    would give too much weight to small batches. The ranks of `distributed` share the batches.
    """
    was_training = model.training
    model.eval()
    sums: dict[str, tuple[float, float]] = {"": (0.0, 0.0)}
    try:
        for batch, counts in distributed.shard_with_uncounted_repeats(batches):
            output = objective(batch)
            batch_sums = {"": (float(output.loss), float(batch.n_targets))}
            batch_sums |= {name: (float(metric.total), float(metric.count)) for name, metric in output.metrics.items()}
            for name, (total, count) in batch_sums.items():
                previous = sums.get(name, (0.0, 0.0))
                sums[name] = (previous[0] + total, previous[1] + count) if counts else previous
    finally:
        model.train(was_training)
    totals = distributed.all_reduce_sum(torch.tensor(list(sums.values()), dtype=torch.float64)).tolist()
    (loss_sum, n_targets), *metric_totals = totals
    metrics = {
        name: total / max(count, 1.0) for name, (total, count) in zip(list(sums)[1:], metric_totals, strict=True)
    }
    return EvaluationResult(loss_sum=loss_sum, n_targets=max(1, int(n_targets)), metrics=metrics)


class EvaluationInterrupt(Exception):  # noqa: N818 - control flow, not an error
    """Raised when a stop signal interrupts an evaluation. The partial sums are discarded."""


def until_stopped(is_stopped: Callable[[], bool], batches: Iterable[TrainingBatch]) -> Iterator[TrainingBatch]:
    """Yield the batches and raise `EvaluationInterrupt` as soon as `is_stopped()` returns True."""
    for batch in batches:
        if is_stopped():
            raise EvaluationInterrupt
        yield batch


def update_progress_after_evaluation(
    progress: TrainingProgress, result: EvaluationResult, *, best_metric: str | None
) -> TrainingProgress:
    """Return the updated training progress after an evaluation.

    The progress records either a new best result or one more evaluation without improvement.
    """
    metric = select_metric(best_metric, result.metrics)
    if not is_improvement(result.loss, progress.best_loss, metric=metric, best_metric_value=progress.best_metric_value):
        return replace(progress, last_eval_step=progress.step, n_evals_since_best=progress.n_evals_since_best + 1)
    return replace(
        progress,
        last_eval_step=progress.step,
        best_loss=result.loss,
        best_metric_value=metric,
        best_step=progress.step,
        n_evals_since_best=0,
    )


def select_metric(best_metric: str | None, metrics: Mapping[str, float]) -> float | None:
    """Return the value of the metric that determines the best checkpoint, or None if the loss determines it."""
    if best_metric is None:
        return None
    if best_metric not in metrics:
        raise ConfigError(
            f"best_metric must be one of the metrics of this run ({', '.join(metrics) or 'none'}), got {best_metric!r}"
        )
    return metrics[best_metric]


def is_improvement(
    loss: float, best_loss: float | None, *, metric: float | None, best_metric_value: float | None
) -> bool:
    """Return True if a result is better than the best one so far.

    Results are compared by the metric. If there is no metric or the values are equal, they are compared by the loss.
    """
    if best_loss is None:
        return True
    if metric is not None and best_metric_value is not None and metric != best_metric_value:
        return metric > best_metric_value
    return loss < best_loss
