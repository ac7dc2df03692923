"""How good a classifier is: its answers beside labelled texts, which it did not learn from."""

from pathlib import Path
from typing import Any

import numpy as np

from qkv.choices import ProblemType
from qkv.data.labeled_texts import Columns, read_labelled
from qkv.errors import InputError
from qkv.tasks.text_encoder import Classification, TextOrPair, TextEncoder
from qkv.training.finetune_data import build_targets
from qkv.training.task_metrics import per_class_report, confusion, measure


def evaluate_classifier(task: TextEncoder, path: str | Path, *, columns: Columns, truncate: bool = False) -> dict[str, Any]:
    """Every measure that fits what the model was trained for, the chief one first, and the number of rows.

    Where a text has one class: also `classes`, each with its rows, precision, recall and F1.
    """
    if "classify" not in task.capabilities:
        raise InputError(f"{task.name} has no classification head to judge; it can {', '.join(task.capabilities)}")
    problem = task.model.config.problem
    is_number = problem is ProblemType.REGRESSION
    labelled = read_labelled(path, columns, is_number=is_number, several=problem is ProblemType.MULTI_LABEL)
    names = task.class_names
    truth = build_targets(problem, labelled, None if is_number else names).numpy()
    texts: list[TextOrPair] = [(row[0], row[1]) if labelled.is_pairs else row[0] for row in labelled.texts]
    answers = task.classify(texts, truncate=truncate)
    answered = np.array([_to_target(problem, answer, names) for answer in answers])
    found = {"rows": len(answers), **measure(problem, answered, truth, n_classes=len(names))}
    if problem is ProblemType.SINGLE_LABEL:
        found["classes"] = per_class_report(confusion(answered, truth, n_classes=len(names)), names)
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
