"""Plot heatmaps and loss curves, and create and save matplotlib figures."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from math import ceil, isfinite, isnan
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor

from qkv.errors import DiskError, InputError, MissingExtraError, ShapeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURE_SUFFIXES = (".png", ".svg", ".pdf")
NOTEBOOK_DPI = 84
"""The resolution of figures in notebooks. A low value keeps the notebook files small."""


TITLE_LINE_INCHES, _TITLE_LETTER_INCHES = 0.18, 0.085
"""The height of a title line and the approximate width of a letter, in inches."""
_MAX_INCHES = 14.0
"""The maximum side length of a heatmap in inches. Larger matrices get smaller cells and fewer labels."""
_LABEL_INCHES = 0.2
"""The space that each axis label needs, in inches."""


@dataclass(frozen=True, kw_only=True)
class Heatmap:
    """A matrix with labeled axes. By default, rows are queries and columns are keys."""

    matrix: Float[Tensor, "row column"]
    rows: Sequence[str]
    columns: Sequence[str]
    title: str = ""
    row_axis: str = "query"
    column_axis: str = "key"
    is_signed: bool = False
    """Whether to use a diverging color map centered at 0.

    Otherwise, the colors range from the minimum (at most 0) to the maximum.
    """
    show_numbers: bool = True
    """Whether to print the values in the cells, provided that there are few enough cells to be legible."""

    def __post_init__(self) -> None:
        if tuple(self.matrix.shape) != (len(self.rows), len(self.columns)):
            raise ShapeError(
                f"the number of labels must match the shape of the matrix, {tuple(self.matrix.shape)}, got "
                f"{len(self.rows)} row labels and {len(self.columns)} column labels"
            )


def plot_heatmaps(*maps: Heatmap, title: str = "", per_row: int | None = None) -> "Figure":
    """Plot heatmaps side by side, with at most `per_row` heatmaps in each row of the figure."""
    if not maps:
        raise ShapeError("at least 1 heatmap is required, got 0")
    first_row = maps[: per_row or len(maps)]
    n_rows = -(-len(maps) // len(first_row))
    figure = new_figure(
        width=sum(_heatmap_width(heatmap) for heatmap in first_row),
        height=n_rows * max(_heatmap_height(heatmap) for heatmap in maps),
    )
    axes = figure.subplots(
        n_rows, len(first_row), squeeze=False, width_ratios=[_heatmap_width(heatmap) for heatmap in first_row]
    ).flatten()
    for axis, heatmap in zip(axes, maps, strict=False):
        _draw_heatmap(axis, heatmap)
    for axis in axes[len(maps) :]:
        axis.set_axis_off()
    if title:
        wrapped_title = wrap_title(title, figure.get_figwidth())
        figure.set_figheight(figure.get_figheight() + TITLE_LINE_INCHES * wrapped_title.count("\n"))
        figure.suptitle(wrapped_title, fontsize="medium")
    return figure


def wrap_title(title: str, width: float) -> str:
    """Wrap a title to the width of a figure in inches. Otherwise, matplotlib would clip long titles on both sides."""
    return "\n".join(fill(line, max(1, int(width / _TITLE_LETTER_INCHES))) for line in title.splitlines())


def new_figure(*, width: float, height: float) -> "Figure":
    """Create an empty figure of the given size in inches.

    The figure is independent of pyplot's global state, and notebooks display it automatically.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError(
            "plotting requires the package matplotlib; install it with: pip install 'qkv[plot]'"
        ) from None
    return _with_notebook_repr(Figure)(figsize=(width, height), layout="constrained", dpi=150)


@cache
def _with_notebook_repr(figure_class: "type[Figure]") -> "type[Figure]":
    """Return a subclass of `Figure` that notebooks display as a PNG image even without pyplot."""

    class Picture(figure_class):
        def _repr_png_(self) -> bytes:
            buffer = BytesIO()
            self.savefig(buffer, format="png", dpi=NOTEBOOK_DPI)
            return buffer.getvalue()

    return Picture


def check_figure_path(path: Path) -> None:
    """Check that a figure can be saved to a path.

    Callers do this first so that an error is reported before any computation.
    """
    if path.suffix.lower() not in FIGURE_SUFFIXES:
        raise InputError(f"{path}: file name must end in one of {' '.join(FIGURE_SUFFIXES)}")
    if not path.parent.is_dir():
        raise InputError(f"{path}: folder not found: {path.parent}")
    new_figure(width=1.0, height=1.0)


def save_figure(figure: "Figure", path: Path) -> None:
    try:
        figure.savefig(path)
    except OSError as error:
        raise DiskError(f"{path}: cannot be written: {error.strerror}") from None


def _heatmap_width(heatmap: Heatmap) -> float:
    return 1.6 + max(2.0, min(0.46 * len(heatmap.columns), _MAX_INCHES))


def _heatmap_height(heatmap: Heatmap) -> float:
    return 1.4 + max(1.6, min(0.36 * len(heatmap.rows), _MAX_INCHES))


def _visible_ticks(n: int, inches: float) -> range:
    """Return the indices of evenly spaced labels that fit along an axis of the given length."""
    return range(0, n, max(1, ceil(n * _LABEL_INCHES / inches)))


def _draw_heatmap(axis: "Axes", heatmap: Heatmap) -> None:
    matrix = heatmap.matrix.detach().float().cpu()
    visible = matrix.masked_fill(~matrix.isfinite(), float("nan"))
    finite = matrix[matrix.isfinite()]
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 1.0)
    if heatmap.is_signed:
        low, high = -max(-low, high), max(-low, high)
    else:
        low, high = min(0.0, low), max(0.0, high)
    # Both color maps are suitable for color-blind readers. In masked cells (−∞), the gray background is visible.
    image = axis.imshow(
        visible.numpy(), cmap="RdBu_r" if heatmap.is_signed else "viridis", vmin=low, vmax=high, aspect="auto"
    )
    axis.set_facecolor("0.85")
    x_ticks, y_ticks = (
        _visible_ticks(len(heatmap.columns), _heatmap_width(heatmap) - 1.6),
        _visible_ticks(len(heatmap.rows), _heatmap_height(heatmap) - 1.4),
    )
    axis.set_xticks(x_ticks, [heatmap.columns[i] for i in x_ticks], rotation=60, ha="right", rotation_mode="anchor")
    axis.set_yticks(y_ticks, [heatmap.rows[i] for i in y_ticks])
    axis.set_xlabel(heatmap.column_axis)
    axis.set_ylabel(heatmap.row_axis)
    axis.set_title(heatmap.title, fontsize="medium")
    axis.figure.colorbar(image, ax=axis, fraction=0.04, pad=0.02)
    if heatmap.show_numbers and matrix.numel() <= 200:
        _annotate_cells(axis, heatmap, matrix, (low, high))


def _annotate_cells(axis: "Axes", heatmap: Heatmap, matrix: Tensor, limits: tuple[float, float]) -> None:
    low, high = limits
    for i, row in enumerate(matrix.tolist()):
        for j, value in enumerate(row):
            share = (value - low) / (high - low or 1.0)
            is_light = 0.25 < share < 0.75 if heatmap.is_signed else share > 0.6
            text = f"{value:.2f}" if isfinite(value) else "NaN" if isnan(value) else "−∞"
            text_color = "black" if is_light or not isfinite(value) else "white"
            axis.text(j, i, text, ha="center", va="center", fontsize=6, color=text_color)


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
