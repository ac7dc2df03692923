"""Compute the metrics of classifications and regressions."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray

from qkv.choices import ProblemType

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
