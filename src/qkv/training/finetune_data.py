"""What is learnt by fine-tuning: labelled texts read, checked against each other, and made ids once for all seeds."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qkv.choices import ProblemKind, Role
from qkv.config import FinetuningConfig
from qkv.data.labelled import Columns, Labelled, read_labelled
from qkv.data.order import Permutation
from qkv.errors import ContextLengthError, InputError
from qkv.text import EncodedPair, Tokenizer, encode_cut, encode_rows
from qkv.training.run import Say


@dataclass(frozen=True, kw_only=True)
class LabelledTask:
    """Two sets of texts, and what the outputs of a model for them mean."""

    problem: ProblemKind
    class_names: tuple[str, ...] | None
    """None where the answer is a number."""
    train: Labelled
    evaluation: Labelled
    train_targets: Tensor
    evaluation_targets: Tensor

    @property
    def n_outputs(self) -> int:
        return 1 if self.class_names is None else len(self.class_names)

    @property
    def variance(self) -> float:
        """Of the numbers to learn; 1 where classes are learnt."""
        if self.problem is not ProblemKind.NUMBER:
            return 1.0
        return float(self.train_targets.var(correction=0)) or 1.0


def read_task(settings: FinetuningConfig) -> LabelledTask:
    """Both files; without one for evaluation a tenth of the rows is held out."""
    train = read_rows(settings, settings.train)
    return make_task(settings, train, None if settings.evaluation is None else read_rows(settings, settings.evaluation))


def read_rows(settings: FinetuningConfig, path: str | Path) -> Labelled:
    columns = Columns(text=settings.text, label=settings.label)
    is_number = settings.problem is ProblemKind.NUMBER
    return read_labelled(path, columns, is_number=is_number, several=settings.problem is ProblemKind.SEVERAL_LABELS)


def make_task(settings: FinetuningConfig, train: Labelled, evaluation: Labelled | None) -> LabelledTask:
    """From rows that are read already."""
    problem = settings.problem
    if evaluation is not None and train.is_pairs != evaluation.is_pairs:
        raise InputError(f"{train.name} and {evaluation.name}: one holds pairs, the other single texts")
    names = None if problem is ProblemKind.NUMBER else train.class_names()
    targets = targets_of(problem, train, names)
    if evaluation is not None:
        held_out = targets_of(problem, evaluation, names)
    else:
        held = draw(problem, targets, max(1, len(targets) // 10), seed=settings.seed)
        kept = np.setdiff1d(np.arange(len(targets)), held)
        if not len(kept):
            raise InputError(f"{train.name}: 1 row is too few to hold some out; give --eval FILE")
        train, evaluation = _part(train, kept), _part(train, held)
        targets, held_out = targets[kept], targets[held]
    return LabelledTask(
        problem=problem,
        class_names=names,
        train=train,
        evaluation=evaluation,
        train_targets=targets,
        evaluation_targets=held_out,
    )


def draw(problem: ProblemKind, targets: Tensor, n: int, *, seed: int) -> NDArray[np.int64]:
    """Row numbers of n rows by chance; of classes each gets its share, and at least one while there are enough."""
    if n > len(targets):
        raise InputError(f"{n} rows were asked for, and there are {len(targets)}")
    shuffled = Permutation(len(targets), seed, 7)(np.arange(len(targets)))
    if problem is not ProblemKind.ONE_CLASS:
        return np.sort(shuffled[:n])
    classes = targets.numpy()[shuffled]
    # A row's rank is the share of its class that is taken once it is; the first of each class comes before all.
    rank = np.empty(len(classes))
    for number in np.unique(classes):
        own = np.flatnonzero(classes == number)
        rank[own] = np.arange(len(own)) / len(own)
    return np.sort(shuffled[np.argsort(rank, kind="stable")[:n]])


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """The task's texts as one model reads them."""

    train: list[EncodedPair]
    evaluation: list[EncodedPair]
    pad_id: int
    n_cut: int


def encode_task(task: LabelledTask, tokenizer: Tokenizer, *, context_length: int, truncate: bool, say: Say) -> Encoded:
    both, n_cut = [], 0
    for labelled in (task.train, task.evaluation):
        encoded = encode_rows(tokenizer, labelled.texts)
        long = [row for row, one in enumerate(encoded) if len(one.ids) > context_length]
        if long and not truncate:
            raise ContextLengthError(
                f"{labelled.place(long[0])}: {len(encoded[long[0]].ids):,} tokens, but the model's context_length is "
                f"{context_length}; {len(long)} of {len(encoded):,} rows are too long: --truncate cuts them"
            )
        for row in long:
            encoded[row] = encode_cut(tokenizer, labelled.texts[row], context_length)
        if long:
            say(f"{labelled.name}: {len(long):,} of {len(encoded):,} texts were cut to {context_length} tokens")
        n_cut += len(long)
        both.append(encoded)
    pad_id = tokenizer.find(Role.PAD)
    return Encoded(train=both[0], evaluation=both[1], pad_id=0 if pad_id is None else pad_id, n_cut=n_cut)


def targets_of(problem: ProblemKind, labelled: Labelled, names: tuple[str, ...] | None) -> Tensor:
    """Class numbers, a table of 0 and 1, or numbers; `names` None: numbers."""
    if names is None:
        return torch.tensor(labelled.numbers(), dtype=torch.float32)
    numbers = labelled.class_numbers(names)
    if problem is ProblemKind.ONE_CLASS:
        return torch.tensor([number for (number,) in numbers])
    table = torch.zeros(len(numbers), len(names))
    for row, own in enumerate(numbers):
        table[row, list(own)] = 1.0
    return table


def _part(labelled: Labelled, rows: NDArray[np.int64]) -> Labelled:
    return Labelled(
        name=labelled.name,
        texts=[labelled.texts[row] for row in rows],
        labels=[labelled.labels[row] for row in rows],
        lines=[labelled.lines[row] for row in rows],
    )
