"""How good a model is on text it was not trained on."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from qkv.errors import ConfigError
from qkv.training.objectives import Objective, TrainingBatch
from qkv.training.ranks import ALONE, Ranks
from qkv.training.run import Progress


@dataclass(frozen=True, kw_only=True)
class Score:
    """Summed −log p over a number of targets, and the bytes of text they stand for where that is known."""

    loss_sum: float
    n_targets: int
    n_bytes: int | None = None
    measures: Mapping[str, float] = field(default_factory=dict)
    """What else the objective measures, by name."""

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.loss_sum / self.n_targets

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float | None:
        return None if self.n_bytes is None else self.loss_sum / math.log(2) / self.n_bytes


@torch.no_grad()
def evaluate(
    model: nn.Module, objective: Objective, batches: Iterable[TrainingBatch], *, ranks: Ranks = ALONE
) -> Score:
    """Sums of sums over counts: an average of averages would weigh short batches too much.

    `ranks` share the batches; this process takes all unless said.
    """
    was_training = model.training
    model.eval()
    sums: dict[str, tuple[float, float]] = {"": (0.0, 0.0)}
    try:
        for batch, counts in ranks.shared(batches):
            outcome = objective(batch)
            found = {"": (float(outcome.loss), float(batch.n_targets))}
            found |= {name: (float(one.total), float(one.count)) for name, one in outcome.measures.items()}
            for name, (total, count) in found.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = (before[0] + total, before[1] + count) if counts else before
    finally:
        model.train(was_training)
    added = ranks.summed(torch.tensor(list(sums.values()), dtype=torch.float64)).tolist()
    (loss_sum, n_targets), *rest = added
    measures = {name: of / max(count, 1.0) for name, (of, count) in zip(list(sums)[1:], rest, strict=True)}
    return Score(loss_sum=loss_sum, n_targets=max(1, int(n_targets)), measures=measures)


class EvaluationStopped(Exception):  # noqa: N818 - nothing is wrong
    """A signal came; what was summed so far is thrown away."""


def unless(is_stopped: Callable[[], bool], batches: Iterable[TrainingBatch]) -> Iterator[TrainingBatch]:
    """The batches, as long as nobody wants the end; asked before each of them."""
    for batch in batches:
        if is_stopped():
            raise EvaluationStopped
        yield batch


def judged(progress: Progress, score: Score, *, best_by: str | None) -> Progress:
    """Where the run stands after this evaluation: is it the best so far, and how many were worse since?"""
    measure = chosen_measure(best_by, score.measures)
    if not is_better(score.loss, progress.best_loss, measure=measure, best_measure=progress.best_measure):
        return replace(progress, evaluated_step=progress.step, n_worse=progress.n_worse + 1)
    return replace(
        progress,
        evaluated_step=progress.step,
        best_loss=score.loss,
        best_measure=measure,
        best_step=progress.step,
        n_worse=0,
    )


def chosen_measure(best_by: str | None, measures: Mapping[str, float]) -> float | None:
    if best_by is None:
        return None
    if best_by not in measures:
        raise ConfigError(f"best_by={best_by!r} is not measured here; known: {', '.join(measures) or 'none'}")
    return measures[best_by]


def is_better(loss: float, best_loss: float | None, *, measure: float | None, best_measure: float | None) -> bool:
    """By the measure where there is one; where it is equal, or there is none, by the loss."""
    if best_loss is None:
        return True
    if measure is not None and best_measure is not None and measure != best_measure:
        return measure > best_measure
    return loss < best_loss
