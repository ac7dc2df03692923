"""How good a model is on text it was not trained on."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from qkv.training.objectives import Objective, TrainingBatch


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
def evaluate(model: nn.Module, objective: Objective, batches: Iterable[TrainingBatch]) -> Score:
    """Sums of sums over counts: an average of averages would weigh short batches too much."""
    was_training = model.training
    model.eval()
    total, n_targets = 0.0, 0
    sums: dict[str, tuple[float, float]] = {}
    try:
        for batch in batches:
            outcome = objective(batch)
            total += float(outcome.loss)
            n_targets += batch.n_targets
            for name, measure in outcome.measures.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = before[0] + float(measure.total), before[1] + float(measure.count)
    finally:
        model.train(was_training)
    measures = {name: of / max(count, 1.0) for name, (of, count) in sums.items()}
    return Score(loss_sum=total, n_targets=max(1, n_targets), measures=measures)
