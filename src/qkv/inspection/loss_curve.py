"""Plot the loss of a training run."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from qkv.errors import InputError
from qkv.inspection.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_loss_curve(metrics_path: Path, *, unit_label: str = "nats per token") -> "Figure":
    """Plot the training loss (thin line: raw, thick line: running mean) and the validation loss at each step.

    If the run uses label smoothing, both losses are plotted without label smoothing.
    """
    lines = (
        [json.loads(line) for line in metrics_path.read_text(encoding="utf-8").splitlines()]
        if metrics_path.exists()
        else []
    )
    training_points = [(line["step"], line.get("unsmoothed_loss", line["loss"])) for line in lines if "loss" in line]
    evaluations = [line for line in lines if "validation_loss" in line]
    validation_points = [(line["step"], line["validation_loss"]) for line in evaluations]
    if not training_points:
        raise InputError(f"{metrics_path}: must contain at least 1 training step, got 0")
    figure = new_figure(width=7.0, height=4.0)
    axis = figure.subplots()
    axis.plot(*zip(*training_points, strict=True), color="#9ecae1", linewidth=0.6)
    axis.plot(*zip(*_smooth_losses(training_points), strict=True), color="#08519c", linewidth=1.6, label="training")
    if validation_points:
        # A metric other than the loss may have determined which checkpoint was selected.
        selected = [point for point, line in zip(validation_points, evaluations, strict=True) if line.get("is_best")]
        step, best = selected[-1] if selected else min(validation_points, key=lambda point: point[1])
        label = "best" if best == min(loss for _, loss in validation_points) else "selected"
        axis.plot(*zip(*validation_points, strict=True), color="#d95f02", marker="o", markersize=3, label="validation")
        # Put this text in the legend because it would cover the curve if it were next to the marker.
        marker_style = {
            "marker": "o",
            "markersize": 7,
            "fillstyle": "none",
            "label": f"{label}: {best:.3f} at step {step:,}",
        }
        axis.plot(step, best, color="#d95f02", linestyle="none", **marker_style)
    axis.set_xlabel("step")
    axis.set_ylabel(f"loss ({unit_label})")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    return figure


def _smooth_losses(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Smooth losses with a running mean over about 2% of the run, or less at the start, where losses fall quickly."""
    width = max(1, len(points) // 50)
    smooth, value = [], points[0][1]
    for index, (step, loss) in enumerate(points):
        value += max(1 / width, 3 / (index + 3)) * (loss - value)
        smooth.append((step, value))
    return smooth
