"""Plot the loss of a training run."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from qkv.errors import InputError
from qkv.inspection.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_loss_curve(metrics: Path, *, unit: str = "nats a token") -> "Figure":
    """Plot training loss (thin: each step, thick: smoothed) and validation loss by step.

    With label smoothing, the training loss is plotted without smoothing, like the validation loss.
    """
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()] if metrics.exists() else []
    trained = [(line["step"], line.get("plain_loss", line["loss"])) for line in lines if "loss" in line]
    evaluated = [line for line in lines if "validation_loss" in line]
    held_out = [(line["step"], line["validation_loss"]) for line in evaluated]
    if not trained:
        raise InputError(f"{metrics}: contains no training steps to plot")
    figure = new_figure(width=7.0, height=4.0)
    axis = figure.subplots()
    axis.plot(*zip(*trained, strict=True), color="#9ecae1", linewidth=0.6)
    axis.plot(*zip(*_smooth_losses(trained), strict=True), color="#08519c", linewidth=1.6, label="training")
    if held_out:
        # The selected checkpoint may have been chosen by a metric other than the loss.
        chosen = [point for point, line in zip(held_out, evaluated, strict=True) if line.get("is_best")]
        step, best = chosen[-1] if chosen else min(held_out, key=lambda point: point[1])
        word = "best" if best == min(loss for _, loss in held_out) else "selected"
        axis.plot(*zip(*held_out, strict=True), color="#d95f02", marker="o", markersize=3, label="validation")
        # The legend holds this text, because next to its marker it would cover the curve.
        kept = {"marker": "o", "markersize": 7, "fillstyle": "none", "label": f"{word}: {best:.3f} at step {step:,}"}
        axis.plot(step, best, color="#d95f02", linestyle="none", **kept)
    axis.set_xlabel("step")
    axis.set_ylabel(f"loss ({unit})")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    return figure


def _smooth_losses(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Smooth with a running mean over about 2 % of the run, or less at the start, where the loss falls quickly."""
    width = max(1, len(points) // 50)
    smooth, value = [], points[0][1]
    for number, (step, loss) in enumerate(points):
        value += max(1 / width, 3 / (number + 3)) * (loss - value)
        smooth.append((step, value))
    return smooth
