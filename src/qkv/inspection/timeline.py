"""Track head patterns and predictions across the checkpoints of a training run."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.choices import AttentionStack, HeadPattern
from qkv.errors import InputError
from qkv.inspection.activation_cache import run_with_cache
from qkv.inspection.heads import classify_heads
from qkv.inspection.logit_lens import logit_lens
from qkv.inspection.model_input import ModelWithTokenizer, prepare_input
from qkv.inspection.short_repr import ShortRepr
from qkv.models import BERT


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainingTimelineView(ShortRepr):
    """The head scores and predictions for one text at each checkpoint of a run."""

    steps: list[int]
    stack: AttentionStack
    scores: Float[Tensor, "step layer head pattern"]
    """The values of `HeadsView.scores` at each step."""
    labels: list[list[list[HeadPattern | None]]]
    positions: list[str]
    depths: list[str]
    targets: list[str | None]
    target_probabilities: Float[Tensor, "step depth position"] | None
    """The values of `LogitLensView.target_probabilities` at each step. `None` for a BERT without a masked-word head."""

    @property
    def losses(self) -> list[float] | None:
        """The mean negative log-probability of the actual tokens at each step."""
        if self.target_probabilities is None:
            return None
        last = self.target_probabilities[:, -1]
        return (-last[:, ~last[0].isnan()].log().mean(-1)).tolist()


def checkpoint_timeline(
    checkpoints: Iterable[tuple[int, ModelWithTokenizer]],
    text: str,
    second_text: str | None = None,
    *,
    stack: AttentionStack | None = None,
) -> TrainingTimelineView:
    """Run the model from each checkpoint on a text, and collect the head scores and predictions.

    `checkpoints` yields pairs of a step and a model with its tokenizer, in order. Only one model is in memory at a
    time.
    """
    steps, views, lenses = [], [], []
    for step, task in checkpoints:
        cache = run_with_cache(task.model, prepare_input(task, text, second_text))
        steps.append(step)
        views.append(classify_heads(cache, stack))
        has_predictions = not (isinstance(task.model, BERT) and task.model.masked_lm is None)
        lenses.append(logit_lens(cache, task.tokenizer, n=1) if has_predictions else None)
    if not steps:
        raise InputError("the run must have at least 1 checkpoint, got 0")
    lens_views = [lens_view for lens_view in lenses if lens_view is not None]
    return TrainingTimelineView(
        steps=steps,
        stack=views[0].stack,
        scores=torch.stack([view.scores for view in views]),
        labels=[view.labels for view in views],
        positions=views[0].queries,
        depths=lens_views[0].depths if lens_views else [],
        targets=lens_views[0].targets if lens_views else [],
        target_probabilities=torch.stack([lens_view.target_probabilities for lens_view in lens_views])
        if lens_views
        else None,
    )
