"""How good a classifier is: its answers beside labelled texts, which it did not learn from."""

from pathlib import Path
from typing import Any

import numpy as np

from qkv.choices import ProblemKind
from qkv.data.labelled import Columns, read_labelled
from qkv.errors import InputError
from qkv.tasks.text_encoder import Answer, Text, TextEncoder
from qkv.training.finetune_data import targets_of
from qkv.training.measures import by_class, confusion, measure


def judged(task: TextEncoder, path: str | Path, *, columns: Columns, truncate: bool = False) -> dict[str, Any]:
    """Every measure that fits what the model was trained for, the chief one first, and the number of rows.

    Where a text has one class: also `classes`, each with its rows, precision, recall and F1.
    """
    if "classify" not in task.abilities:
        raise InputError(f"{task.name} has no classification head to judge; it can {', '.join(task.abilities)}")
    problem = task.model.config.problem
    is_number = problem is ProblemKind.NUMBER
    labelled = read_labelled(path, columns, is_number=is_number, several=problem is ProblemKind.SEVERAL_LABELS)
    names = task.class_names
    truth = targets_of(problem, labelled, None if is_number else names).numpy()
    texts: list[Text] = [(row[0], row[1]) if labelled.is_pairs else row[0] for row in labelled.texts]
    answers = task.classify(texts, truncate=truncate)
    answered = np.array([_as_target(problem, answer, names) for answer in answers])
    found = {"rows": len(answers), **measure(problem, answered, truth, n_classes=len(names))}
    if problem is ProblemKind.ONE_CLASS:
        found["classes"] = by_class(confusion(answered, truth, n_classes=len(names)), names)
    return found


def _as_target(problem: ProblemKind, answer: Answer, names: tuple[str, ...]) -> float | int | list[int]:
    match problem:
        case ProblemKind.ONE_CLASS:
            return names.index(answer.labels[0])
        case ProblemKind.SEVERAL_LABELS:
            return [int(name in answer.labels) for name in names]
        case ProblemKind.NUMBER:
            assert answer.number is not None
            return answer.number
