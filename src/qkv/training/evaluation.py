"""Evaluate a model on held-out batches, and compute the metrics of classifications and regressions."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import nn

from qkv.choices import ProblemType
from qkv.errors import ConfigError
from qkv.training.checkpoint import TrainingProgress
from qkv.training.distributed import SINGLE_PROCESS, Distributed
from qkv.training.objectives import Objective, TrainingBatch


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


ClassIds: TypeAlias = Int[np.ndarray, "row"]
ConfusionMatrix: TypeAlias = Int[np.ndarray, "true predicted"]
Values: TypeAlias = Float[np.ndarray, "row"]


def compute_task_metrics(
    problem: ProblemType, predictions: NDArray, targets: NDArray, *, n_classes: int
) -> dict[str, float]:
    """Compute all metrics for the given problem type. The main metric comes first.

    Predictions and targets are class ids, 0/1 label matrices or numbers, depending on the problem. `exact_match` is the
    fraction of texts whose labels are all correct.
    """
    match problem:
        case ProblemType.SINGLE_LABEL:
            matrix = confusion_matrix(predictions, targets, n_classes=n_classes)
            # By convention, the binary F1 is the score of the second class: `positive` in (negative, positive).
            binary_f1 = {"f1": float(f1_per_class(matrix)[1])} if n_classes == 2 else {}
            return {
                "accuracy": accuracy(matrix),
                **binary_f1,
                "f1_macro": float(f1_per_class(matrix).mean()),
                "mcc": matthews_correlation(matrix),
            }
        case ProblemType.MULTI_LABEL:
            targets = targets.astype(np.int64)
            matrices = [confusion_matrix(predictions[:, i], targets[:, i], n_classes=2) for i in range(n_classes)]
            f1_per_label = np.array([f1_per_class(matrix)[1] for matrix in matrices])
            micro_f1 = float(f1_per_class(np.sum(matrices, axis=0))[1])
            exact_match = float((predictions == targets).all(axis=1).mean())
            return {"f1_micro": micro_f1, "f1_macro": float(f1_per_label.mean()), "exact_match": exact_match}
        case ProblemType.REGRESSION:
            error = float(np.abs(predictions - targets).mean())
            return {
                "pearson": pearson_correlation(predictions, targets),
                "spearman": spearman_correlation(predictions, targets),
                "absolute_error": error,
            }


def confusion_matrix(predictions: ClassIds, targets: ClassIds, *, n_classes: int) -> ConfusionMatrix:
    """Count how often class i (row) was predicted as class j (column)."""
    counts = np.bincount(targets.astype(np.int64) * n_classes + predictions.astype(np.int64), minlength=n_classes**2)
    return counts.reshape(n_classes, n_classes)


def accuracy(matrix: ConfusionMatrix) -> float:
    return float(np.trace(matrix) / matrix.sum())


def f1_per_class(matrix: ConfusionMatrix) -> Float[np.ndarray, "class"]:
    """Return the F1 score of each class, or 0 for a class that neither occurs nor is predicted."""
    correct, sums = np.diag(matrix), matrix.sum(axis=0) + matrix.sum(axis=1)
    return 2.0 * correct / np.maximum(sums, 1)


def per_class_report(matrix: ConfusionMatrix, names: Sequence[str]) -> list[dict[str, str | float | int]]:
    """Return the number of rows, precision, recall and F1 for each class."""
    correct, predicted, true = np.diag(matrix), matrix.sum(axis=0), matrix.sum(axis=1)
    return [
        {
            "class": name,
            "rows": int(true[i]),
            "precision": float(correct[i] / max(predicted[i], 1)),
            "recall": float(correct[i] / max(true[i], 1)),
            "f1": float(f1_per_class(matrix)[i]),
        }
        for i, name in enumerate(names)
    ]


def matthews_correlation(matrix: ConfusionMatrix) -> float:
    """Compute the multi-class Matthews correlation coefficient (Gorodkin 2004).

    The result is 0 if the predictions or targets are constant.
    """
    n, correct = float(matrix.sum()), float(np.trace(matrix))
    predicted, true = matrix.sum(axis=0).astype(float), matrix.sum(axis=1).astype(float)
    spread = (n**2 - predicted @ predicted) * (n**2 - true @ true)
    return float((correct * n - predicted @ true) / spread**0.5) if spread > 0 else 0.0


def pearson_correlation(a: Values, b: Values) -> float:
    """Compute the Pearson correlation coefficient, or return 0 if either input is constant."""
    a, b = a.astype(np.float64) - a.mean(dtype=np.float64), b.astype(np.float64) - b.mean(dtype=np.float64)
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale > 0 else 0.0


def spearman_correlation(a: Values, b: Values) -> float:
    """Compute the Spearman rank correlation coefficient. Equal values receive the mean of their ranks."""
    return pearson_correlation(_average_ranks(a), _average_ranks(b))


def _average_ranks(values: Values) -> Float[np.ndarray, "row"]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[inverse]
