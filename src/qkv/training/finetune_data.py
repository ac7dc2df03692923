"""Load and tokenize labeled texts for fine-tuning."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qkv.choices import ProblemType, SpecialToken
from qkv.config import FinetuningConfig
from qkv.data.labeled_texts import ColumnNames, LabeledTexts, read_labeled_texts
from qkv.data.sampler import Permutation
from qkv.errors import ContextLengthError, InputError
from qkv.text import Encoding, Tokenizer, encode_texts, encode_truncated
from qkv.training.checkpoint import LogFunction


@dataclass(frozen=True, kw_only=True)
class LabeledTask:
    """Training and evaluation texts with their targets, and the meaning of the model outputs."""

    problem_type: ProblemType
    class_names: tuple[str, ...] | None
    """Names of the classes, or None for regression."""
    train: LabeledTexts
    evaluation: LabeledTexts
    train_targets: Tensor
    evaluation_targets: Tensor

    @property
    def n_outputs(self) -> int:
        return 1 if self.class_names is None else len(self.class_names)

    @property
    def target_variance_or_one(self) -> float:
        """Variance of the targets for regression, or 1 for classification."""
        if self.problem_type is not ProblemType.REGRESSION:
            return 1.0
        return float(self.train_targets.var(correction=0)) or 1.0


def load_task_with_evaluation_split(settings: FinetuningConfig) -> LabeledTask:
    """Load the task from its files. If there is no evaluation file, 10 % of the training rows are held out."""
    train = load_labeled_rows(settings, settings.train)
    return build_task_with_evaluation_split(
        settings, train, None if settings.evaluation is None else load_labeled_rows(settings, settings.evaluation)
    )


def load_labeled_rows(settings: FinetuningConfig, path: str | Path) -> LabeledTexts:
    columns = ColumnNames(text=settings.text_columns, label=settings.label_column)
    is_number = settings.problem_type is ProblemType.REGRESSION
    return read_labeled_texts(
        path, columns, prefer_score_column=is_number, multi_label=settings.problem_type is ProblemType.MULTI_LABEL
    )


def build_task_with_evaluation_split(
    settings: FinetuningConfig, train: LabeledTexts, evaluation: LabeledTexts | None
) -> LabeledTask:
    """Build the task from loaded rows. If `evaluation` is None, 10 % of the training rows are held out."""
    problem_type = settings.problem_type
    if evaluation is not None and train.is_pairs != evaluation.is_pairs:
        raise InputError(
            f"{train.name} and {evaluation.name}: both files must contain pairs, or both must contain single texts"
        )
    names = None if problem_type is ProblemType.REGRESSION else train.class_names()
    targets = build_targets(problem_type, train, names)
    if evaluation is not None:
        evaluation_targets = build_targets(problem_type, evaluation, names)
    else:
        evaluation_rows = sample_rows(problem_type, targets, max(1, len(targets) // 10), seed=settings.seed)
        train_rows = np.setdiff1d(np.arange(len(targets)), evaluation_rows)
        if not len(train_rows):
            raise InputError(
                f"{train.name}: must have at least 2 rows to hold out evaluation rows, got 1; specify --eval FILE"
            )
        train, evaluation = _select_rows(train, train_rows), _select_rows(train, evaluation_rows)
        targets, evaluation_targets = targets[train_rows], targets[evaluation_rows]
    return LabeledTask(
        problem_type=problem_type,
        class_names=names,
        train=train,
        evaluation=evaluation,
        train_targets=targets,
        evaluation_targets=evaluation_targets,
    )


def sample_rows(problem_type: ProblemType, targets: Tensor, n: int, *, seed: int) -> NDArray[np.int64]:
    """Sample n row indices without replacement.

    For single-label classification, the sample is stratified and contains at least one row per class if n is large
    enough.
    """
    if n > len(targets):
        raise InputError(f"the number of rows to sample must be at most {len(targets)}, got {n}")
    shuffled = Permutation(len(targets), seed, 7)(np.arange(len(targets)))
    if problem_type is not ProblemType.SINGLE_LABEL:
        return np.sort(shuffled[:n])
    classes = targets.numpy()[shuffled]
    # Sort the rows by the fraction of rows in the same class that precede them. The first row of every class has
    # priority 0.
    priority = np.empty(len(classes))
    for class_id in np.unique(classes):
        class_rows = np.flatnonzero(classes == class_id)
        priority[class_rows] = np.arange(len(class_rows)) / len(class_rows)
    return np.sort(shuffled[np.argsort(priority, kind="stable")[:n]])


@dataclass(frozen=True, kw_only=True)
class EncodedTaskTexts:
    """The texts of a task as token ids for a specific model."""

    train: list[Encoding]
    evaluation: list[Encoding]
    pad_id: int
    n_truncated: int


def tokenize_task_texts(
    task: LabeledTask, tokenizer: Tokenizer, *, context_length: int, truncate: bool, log: LogFunction
) -> EncodedTaskTexts:
    encoded_sets, n_truncated = [], 0
    for labeled in (task.train, task.evaluation):
        encoded = encode_texts(tokenizer, labeled.texts)
        too_long = [row for row, encoding in enumerate(encoded) if len(encoding.ids) > context_length]
        if too_long and not truncate:
            raise ContextLengthError(
                f"{labeled.location(too_long[0])}: {len(encoded[too_long[0]].ids):,} tokens exceed "
                f"context_length={context_length}; {len(too_long)} of {len(encoded):,} rows are too long; to truncate "
                "them, use --truncate"
            )
        for row in too_long:
            encoded[row] = encode_truncated(tokenizer, labeled.texts[row], context_length)
        if too_long:
            log(
                f"{labeled.name}: {len(too_long):,} of {len(encoded):,} texts were truncated to {context_length} tokens"
            )
        n_truncated += len(too_long)
        encoded_sets.append(encoded)
    pad_id = tokenizer.find_special_id(SpecialToken.PAD)
    return EncodedTaskTexts(
        train=encoded_sets[0],
        evaluation=encoded_sets[1],
        pad_id=0 if pad_id is None else pad_id,
        n_truncated=n_truncated,
    )


def build_targets(problem_type: ProblemType, labeled: LabeledTexts, class_names: tuple[str, ...] | None) -> Tensor:
    """Return class ids, a 0/1 label matrix, or numbers if `class_names` is None."""
    if class_names is None:
        return torch.tensor(labeled.numeric_labels(), dtype=torch.float32)
    class_ids = labeled.class_indices(class_names)
    if problem_type is ProblemType.SINGLE_LABEL:
        return torch.tensor([class_id for (class_id,) in class_ids])
    matrix = torch.zeros(len(class_ids), len(class_names))
    for row, row_classes in enumerate(class_ids):
        matrix[row, list(row_classes)] = 1.0
    return matrix


def _select_rows(labeled: LabeledTexts, rows: NDArray[np.int64]) -> LabeledTexts:
    return LabeledTexts(
        name=labeled.name,
        texts=[labeled.texts[row] for row in rows],
        labels=[labeled.labels[row] for row in rows],
        line_numbers=[labeled.line_numbers[row] for row in rows],
    )
