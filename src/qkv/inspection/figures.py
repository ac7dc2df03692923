"""Pictures of what was recorded, as matplotlib figures: PNG, SVG, PDF."""

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
"""Dots an inch: a notebook is kept with its pictures, so they are small."""


@dataclass(frozen=True, kw_only=True)
class Heatmap:
    """A matrix with labelled axes: rows are queries, columns are keys, unless the labels say otherwise."""

    matrix: Float[Tensor, "row column"]
    rows: Sequence[str]
    columns: Sequence[str]
    title: str = ""
    row_axis: str = "query"
    column_axis: str = "key"
    is_signed: bool = False
    """Colours diverge around 0; otherwise they grow from the smallest value, or from 0 where none is below."""
    show_numbers: bool = True
    """Print the numbers into the cells, where there are few enough to read."""

    def __post_init__(self) -> None:
        if tuple(self.matrix.shape) != (len(self.rows), len(self.columns)):
            raise ShapeError(
                f"the matrix is {tuple(self.matrix.shape)}, there are {len(self.rows)} row labels "
                f"and {len(self.columns)} column labels"
            )


def plot_heatmaps(*maps: Heatmap, title: str = "", in_a_row: int | None = None) -> "Figure":
    """Heat maps side by side; `in_a_row`: so many, then a new row (for maps of one size)."""
    if not maps:
        raise ShapeError("0 heat maps were given, there must be at least 1")
    first = maps[: in_a_row or len(maps)]
    n_rows = -(-len(maps) // len(first))
    figure = new_figure(width=sum(_heatmap_width(one) for one in first), height=n_rows * max(_heatmap_height(one) for one in maps))
    axes = figure.subplots(n_rows, len(first), squeeze=False, width_ratios=[_heatmap_width(one) for one in first]).flatten()
    for axis, one in zip(axes, maps, strict=False):
        _draw_heatmap(axis, one)
    for axis in axes[len(maps) :]:
        axis.set_axis_off()
    if title:
        said = wrap_title(title, figure.get_figwidth())
        figure.set_figheight(figure.get_figheight() + TITLE_LINE_INCHES * said.count("\n"))
        figure.suptitle(said, fontsize="medium")
    return figure


TITLE_LINE_INCHES, _TITLE_LETTER_INCHES = 0.18, 0.085
"""Inches that a line of a title needs, and a letter of it."""


def wrap_title(title: str, width: float) -> str:
    """In lines that a picture so many inches wide holds: matplotlib cuts what is longer at both sides."""
    return "\n".join(fill(line, max(1, int(width / _TITLE_LETTER_INCHES))) for line in title.splitlines())


def new_figure(*, width: float, height: float) -> "Figure":
    """An empty figure in inches, without pyplot: nothing global, no window. A notebook shows it by itself."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("figures need matplotlib: pip install 'qkv[plot]'") from None
    return _with_notebook_repr(Figure)(figsize=(width, height), layout="constrained", dpi=150)


@cache
def _with_notebook_repr(of: "type[Figure]") -> "type[Figure]":
    """Without pyplot nobody tells a notebook how to show a figure."""

    class Picture(of):
        def _repr_png_(self) -> bytes:
            made = BytesIO()
            self.savefig(made, format="png", dpi=NOTEBOOK_DPI)
            return made.getvalue()

    return Picture


def check_figure_path(path: Path) -> None:
    """A picture that cannot be drawn is refused before anything is computed, not after."""
    if path.suffix.lower() not in FIGURE_SUFFIXES:
        raise InputError(f"{path}: the name must end in one of {' '.join(FIGURE_SUFFIXES)}")
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}")
    new_figure(width=1.0, height=1.0)


def save_figure(figure: "Figure", path: Path) -> None:
    try:
        figure.savefig(path)
    except OSError as error:
        raise DiskError(f"{path}: cannot be written: {error.strerror}") from None


_MAX_INCHES = 14.0
"""Inches, for a map of many tokens: from there on cells get smaller, and not every one has its label."""
_LABEL_INCHES = 0.2
"""Inches that a label needs."""


def _heatmap_width(one: Heatmap) -> float:
    return 1.6 + max(2.0, min(0.46 * len(one.columns), _MAX_INCHES))


def _heatmap_height(one: Heatmap) -> float:
    return 1.4 + max(1.6, min(0.36 * len(one.rows), _MAX_INCHES))


def _visible_ticks(n: int, inches: float) -> range:
    """Which of n labels are shown: as many as there is room for."""
    return range(0, n, max(1, ceil(n * _LABEL_INCHES / inches)))


def _draw_heatmap(axis: "Axes", one: Heatmap) -> None:
    matrix = one.matrix.detach().float().cpu()
    shown = matrix.masked_fill(~matrix.isfinite(), float("nan"))
    finite = matrix[matrix.isfinite()]
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 1.0)
    if one.is_signed:
        low, high = -max(-low, high), max(-low, high)
    else:
        low, high = min(0.0, low), max(0.0, high)
    # Both maps are safe for the colour-blind; grey is what the mask forbids (−∞).
    image = axis.imshow(
        shown.numpy(), cmap="RdBu_r" if one.is_signed else "viridis", vmin=low, vmax=high, aspect="auto"
    )
    axis.set_facecolor("0.85")
    across, down = _visible_ticks(len(one.columns), _heatmap_width(one) - 1.6), _visible_ticks(len(one.rows), _heatmap_height(one) - 1.4)
    axis.set_xticks(across, [one.columns[i] for i in across], rotation=60, ha="right", rotation_mode="anchor")
    axis.set_yticks(down, [one.rows[i] for i in down])
    axis.set_xlabel(one.column_axis)
    axis.set_ylabel(one.row_axis)
    axis.set_title(one.title, fontsize="medium")
    axis.figure.colorbar(image, ax=axis, fraction=0.04, pad=0.02)
    if one.show_numbers and matrix.numel() <= 200:
        _annotate_cells(axis, one, matrix, (low, high))


def _annotate_cells(axis: "Axes", one: Heatmap, matrix: Tensor, limits: tuple[float, float]) -> None:
    low, high = limits
    for i, row in enumerate(matrix.tolist()):
        for j, value in enumerate(row):
            share = (value - low) / (high - low or 1.0)
            on_light = 0.25 < share < 0.75 if one.is_signed else share > 0.6
            text = f"{value:.2f}" if isfinite(value) else "NaN" if isnan(value) else "−∞"
            ink = "black" if on_light or not isfinite(value) else "white"
            axis.text(j, i, text, ha="center", va="center", fontsize=6, color=ink)
