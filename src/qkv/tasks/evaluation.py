"""Evaluate a classifier on held-out labeled texts."""

from pathlib import Path
from typing import Any

import numpy as np

from qkv.choices import ProblemType
from qkv.data.labeled_texts import ColumnNames, read_labeled_texts
from qkv.errors import InputError
from qkv.tasks.text_encoder import Classification, TextEncoder, TextOrPair
from qkv.training.finetune_data import build_targets
from qkv.training.task_metrics import compute_task_metrics, confusion_matrix, per_class_report


def evaluate_classifier(
    task: TextEncoder, path: str | Path, *, columns: ColumnNames, truncate: bool = False
) -> dict[str, Any]:
    """Evaluate a classifier on a file of labeled texts, and return its metrics and the number of rows.

    The metrics depend on the model's problem type, and the main metric comes first. For single-label classification,
    `classes` lists the number of rows, precision, recall and F1 for each class.
    """
    if "classify" not in task.capabilities:
        raise InputError(
            f"{task.name} has no classification head, so it cannot be evaluated on labeled texts "
            f"(it supports: {', '.join(task.capabilities)})"
        )
    problem = task.model.config.problem_type
    is_regression = problem is ProblemType.REGRESSION
    labeled = read_labeled_texts(
        path, columns, prefer_score_column=is_regression, multi_label=problem is ProblemType.MULTI_LABEL
    )
    class_names = task.class_names
    targets = build_targets(problem, labeled, None if is_regression else class_names).numpy()
    texts: list[TextOrPair] = [(row[0], row[1]) if labeled.is_pairs else row[0] for row in labeled.texts]
    classifications = task.classify(texts, truncate=truncate)
    predictions = np.array([_to_target(problem, classification, class_names) for classification in classifications])
    metrics = {
        "rows": len(classifications),
        **compute_task_metrics(problem, predictions, targets, n_classes=len(class_names)),
    }
    if problem is ProblemType.SINGLE_LABEL:
        metrics["classes"] = per_class_report(
            confusion_matrix(predictions, targets, n_classes=len(class_names)), class_names
        )
    return metrics


def _to_target(
    problem: ProblemType, classification: Classification, class_names: tuple[str, ...]
) -> float | int | list[int]:
    match problem:
        case ProblemType.SINGLE_LABEL:
            return class_names.index(classification.labels[0])
        case ProblemType.MULTI_LABEL:
            return [int(name in classification.labels) for name in class_names]
        case ProblemType.REGRESSION:
            assert classification.value is not None
            return classification.value
