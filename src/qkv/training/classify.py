"""What a classifier is trained to do: a text or a pair in, its class, its labels or its number out."""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from qkv.choices import Precision, ProblemKind
from qkv.config import TrainingConfig
from qkv.data.buckets import LabelledBatch
from qkv.models import BERT
from qkv.training.objectives import Measure, Objective, Outcome, autocasting

STEP_MEASURES = {
    ProblemKind.ONE_CLASS: "accuracy",
    ProblemKind.SEVERAL_LABELS: "label_accuracy",
    ProblemKind.NUMBER: "absolute_error",
}
"""What is measured beside the loss; `label_accuracy` asks each label of each text by itself."""


def class_of_text(model: BERT, config: TrainingConfig, *, variance: float = 1.0) -> Objective:
    """`variance`: of the numbers that are to be learnt; the loss of a number is the share of it that is missed."""
    device, problem = model.embedding.token.weight.device, model.config.problem
    autocast = autocasting(config.precision, device)

    def both(batch: LabelledBatch) -> tuple[Tensor, Tensor]:
        logits = class_logits(model, batch).float()
        match problem:
            case ProblemKind.ONE_CLASS:
                return F.cross_entropy(logits, batch.targets, reduction="sum"), logits.argmax(-1) == batch.targets
            case ProblemKind.SEVERAL_LABELS:
                loss = F.binary_cross_entropy_with_logits(logits, batch.targets, reduction="sum")
                return loss, (logits > 0) == batch.targets.bool()
            case ProblemKind.NUMBER:
                error = logits.squeeze(-1) - batch.targets
                return error.square().sum() / variance, error.abs()

    # Widths differ from batch to batch: one graph for all of them.
    compute = torch.compile(both, dynamic=True) if config.compile else both
    name = STEP_MEASURES[problem]

    def objective(batch: LabelledBatch) -> Outcome:
        with autocast():
            loss, each = compute(batch.to(device))
        return Outcome(loss, {name: Measure(each.float().sum(), torch.full((), each.numel(), device=device))})

    return objective


def class_logits(model: BERT, batch: LabelledBatch) -> Tensor:
    """A model that does not tell a pair's texts apart takes it as it stands."""
    segments = batch.segments if model.config.parts_pairs else None
    return model.class_logits(model(batch.ids, segments=segments, attention_mask=batch.attention_mask))


@torch.inference_mode()
def answers(model: BERT, batches: Iterable[LabelledBatch], *, precision: Precision) -> NDArray:
    """For each row, in the rows' order: its class, a table of 0 and 1, or its number."""
    device = model.embedding.token.weight.device
    model.eval()
    rows, logits = [], []
    with autocasting(precision, device)():
        for batch in batches:
            rows.append(batch.rows)
            logits.append(class_logits(model, batch.to(device)).float())
    found = torch.cat(logits).cpu().numpy()
    ordered = np.empty_like(found)
    ordered[torch.cat(rows).numpy()] = found
    match model.config.problem:
        case ProblemKind.ONE_CLASS:
            return ordered.argmax(-1)
        case ProblemKind.SEVERAL_LABELS:
            return (ordered > 0).astype(np.int64)
        case ProblemKind.NUMBER:
            return ordered[:, 0].astype(np.float64)
