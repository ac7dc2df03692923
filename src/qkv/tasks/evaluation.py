"""Evaluate a classifier on held-out labeled texts."""

from pathlib import Path
from typing import Any

import numpy as np

from qkv.choices import ProblemType
from qkv.data.labeled_texts import ColumnNames, read_labeled_texts
from qkv.errors import InputError
from qkv.tasks.text_encoder import Classification, TextEncoder, TextOrPair
from qkv.training.finetune_data import build_targets
from qkv.training.task_metrics import confusion, measure, per_class_report


def evaluate_classifier(
    task: TextEncoder, path: str | Path, *, columns: ColumnNames, truncate: bool = False
) -> dict[str, Any]:
    """Compute all metrics for the model's problem type, with the main metric first, and the number of rows.

    For single-label classification, `classes` lists the rows, precision, recall and F1 of each class.
    """
    if "classify" not in task.capabilities:
        raise InputError(
            f"{task.name} has no classification head to evaluate (it supports: {', '.join(task.capabilities)})"
        )
    problem = task.model.config.problem
    is_number = problem is ProblemType.REGRESSION
    labelled = read_labeled_texts(path, columns, is_numeric=is_number, multi_label=problem is ProblemType.MULTI_LABEL)
    names = task.class_names
    truth = build_targets(problem, labelled, None if is_number else names).numpy()
    texts: list[TextOrPair] = [(row[0], row[1]) if labelled.is_pairs else row[0] for row in labelled.texts]
    answers = task.classify(texts, truncate=truncate)
    answered = np.array([_to_target(problem, answer, names) for answer in answers])
    found = {"rows": len(answers), **measure(problem, answered, truth, n_classes=len(names))}
    if problem is ProblemType.SINGLE_LABEL:
        found["classes"] = per_class_report(confusion_matrix(answered, truth, n_classes=len(names)), names)
    return found


def _to_target(problem: ProblemType, answer: Classification, names: tuple[str, ...]) -> float | int | list[int]:
    match problem:
        case ProblemType.SINGLE_LABEL:
            return names.index(answer.labels[0])
        case ProblemType.MULTI_LABEL:
            return [int(name in answer.labels) for name in names]
        case ProblemType.REGRESSION:
            assert answer.value is not None
            return answer.value
