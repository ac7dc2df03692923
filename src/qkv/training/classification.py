"""Training objective and predictions for text classification and regression."""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from qkv.choices import Precision, ProblemType
from qkv.config import TrainingConfig
from qkv.data.labeled_texts import LabeledBatch
from qkv.models import BERT
from qkv.training.objectives import LossOutput, Metric, Objective, autocast_factory

STEP_METRICS = {
    ProblemType.SINGLE_LABEL: "accuracy",
    ProblemType.MULTI_LABEL: "label_accuracy",
    ProblemType.REGRESSION: "absolute_error",
}
"""Name of the metric that is logged at every step. `label_accuracy` counts every label of every text separately."""


def classification_objective(model: BERT, config: TrainingConfig, *, target_variance: float = 1.0) -> Objective:
    """Return the objective for the model's problem type: cross-entropy, binary cross-entropy or squared error.

    For regression, the loss is divided by `target_variance` to give the unexplained fraction of the targets' variance.
    """
    device, problem_type = model.embedding.token.weight.device, model.config.problem_type
    autocast = autocast_factory(config.precision, device)

    def loss_and_metric(batch: LabeledBatch) -> tuple[Tensor, Tensor]:
        logits = compute_class_logits(model, batch).float()
        match problem_type:
            case ProblemType.SINGLE_LABEL:
                return F.cross_entropy(logits, batch.targets, reduction="sum"), logits.argmax(-1) == batch.targets
            case ProblemType.MULTI_LABEL:
                loss = F.binary_cross_entropy_with_logits(logits, batch.targets, reduction="sum")
                return loss, (logits > 0) == batch.targets.bool()
            case ProblemType.REGRESSION:
                error = logits.squeeze(-1) - batch.targets
                return error.square().sum() / target_variance, error.abs()

    # Use dynamic shapes because the sequence length differs between batches.
    compute = torch.compile(loss_and_metric, dynamic=True) if config.compile else loss_and_metric
    name = STEP_METRICS[problem_type]

    def objective(batch: LabeledBatch) -> LossOutput:
        with autocast():
            loss, metric_values = compute(batch.to(device))
        return LossOutput(
            loss, {name: Metric(metric_values.float().sum(), torch.full((), metric_values.numel(), device=device))}
        )

    return objective


def compute_class_logits(model: BERT, batch: LabeledBatch) -> Tensor:
    """Compute the classifier's logits. Segment ids are passed only to models that use them."""
    segments = batch.segments if model.config.has_multiple_segments else None
    return model.class_logits(model(batch.ids, segments=segments, attention_mask=batch.attention_mask))


@torch.inference_mode()
def predict_labels_in_row_order(model: BERT, batches: Iterable[LabeledBatch], *, precision: Precision) -> NDArray:
    """Predict class ids, a 0/1 label matrix or numbers for every row, in the original order."""
    device = model.embedding.token.weight.device
    model.eval()
    rows, logits = [], []
    with autocast_factory(precision, device)():
        for batch in batches:
            rows.append(batch.rows)
            logits.append(compute_class_logits(model, batch.to(device)).float())
    all_logits = torch.cat(logits).cpu().numpy()
    ordered = np.empty_like(all_logits)
    ordered[torch.cat(rows).numpy()] = all_logits
    match model.config.problem_type:
        case ProblemType.SINGLE_LABEL:
            return ordered.argmax(-1)
        case ProblemType.MULTI_LABEL:
            return (ordered > 0).astype(np.int64)
        case ProblemType.REGRESSION:
            return ordered[:, 0].astype(np.float64)
