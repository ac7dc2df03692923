"""How good a set of answers is: accuracy, F1, Matthews, Pearson, Spearman, the confusion matrix."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray

from qkv.choices import ProblemKind

Answers: TypeAlias = Int[np.ndarray, "row"]
Confusion: TypeAlias = Int[np.ndarray, "true answered"]
Numbers: TypeAlias = Float[np.ndarray, "row"]


def measure(problem: ProblemKind, answers: NDArray, truth: NDArray, *, n_classes: int) -> dict[str, float]:
    """Every figure that fits the problem, the chief one first. Answers and truth are as the problem has them:
    class numbers, a table of 0 and 1, or numbers. `exact_match`: all labels of a text right, none besides.
    """
    match problem:
        case ProblemKind.ONE_CLASS:
            table = confusion(answers, truth, n_classes=n_classes)
            # For two classes the field's F1 is that of the second: `positive` of (negative, positive), 1 of (0, 1).
            second = {"f1": float(f1(table)[1])} if n_classes == 2 else {}
            return {"accuracy": accuracy(table), **second, "f1_macro": float(f1(table).mean()), "mcc": matthews(table)}
        case ProblemKind.SEVERAL_LABELS:
            truth = truth.astype(np.int64)
            tables = [confusion(answers[:, i], truth[:, i], n_classes=2) for i in range(n_classes)]
            each = np.array([f1(table)[1] for table in tables])
            together = float(f1(np.sum(tables, axis=0))[1])
            all_right = float((answers == truth).all(axis=1).mean())
            return {"f1_micro": together, "f1_macro": float(each.mean()), "exact_match": all_right}
        case ProblemKind.NUMBER:
            error = float(np.abs(answers - truth).mean())
            return {"pearson": pearson(answers, truth), "spearman": spearman(answers, truth), "absolute_error": error}


def confusion(answers: Answers, truth: Answers, *, n_classes: int) -> Confusion:
    """How often class i (row) was called class j (column)."""
    counts = np.bincount(truth.astype(np.int64) * n_classes + answers.astype(np.int64), minlength=n_classes**2)
    return counts.reshape(n_classes, n_classes)


def accuracy(table: Confusion) -> float:
    return float(np.trace(table) / table.sum())


def f1(table: Confusion) -> Float[np.ndarray, "class"]:
    """Of each class: 2·right / (called so + are so); 0 for a class that neither occurs nor is called."""
    right, sums = np.diag(table), table.sum(axis=0) + table.sum(axis=1)
    return 2.0 * right / np.maximum(sums, 1)


def by_class(table: Confusion, names: Sequence[str]) -> list[dict[str, str | float | int]]:
    """Precision: of the answers with that class, the right ones; recall: of its rows, those that were found."""
    right, answered, true = np.diag(table), table.sum(axis=0), table.sum(axis=1)
    return [
        {
            "class": name, "rows": int(true[i]), "precision": float(right[i] / max(answered[i], 1)),
            "recall": float(right[i] / max(true[i], 1)), "f1": float(f1(table)[i]),
        }
        for i, name in enumerate(names)
    ]  # fmt: skip


def matthews(table: Confusion) -> float:
    """The correlation of answers and truth, for any number of classes (Gorodkin 2004); 0 where one is constant."""
    n, right = float(table.sum()), float(np.trace(table))
    answered, true = table.sum(axis=0).astype(float), table.sum(axis=1).astype(float)
    spread = (n**2 - answered @ answered) * (n**2 - true @ true)
    return float((right * n - answered @ true) / spread**0.5) if spread > 0 else 0.0


def pearson(a: Numbers, b: Numbers) -> float:
    """0 where one side is constant."""
    a, b = a.astype(np.float64) - a.mean(dtype=np.float64), b.astype(np.float64) - b.mean(dtype=np.float64)
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size > 0 else 0.0


def spearman(a: Numbers, b: Numbers) -> float:
    """Pearson of the ranks; equal values share the mean of theirs."""
    return pearson(_ranks(a), _ranks(b))


def _ranks(values: Numbers) -> Float[np.ndarray, "row"]:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[place]
