"""Plot word vectors in two dimensions with PCA."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.errors import ShapeError
from qkv.inspection.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The Okabe–Ito palette combined with distinct markers makes groups distinguishable in print and for color-blind
# readers.
COLORS_AND_MARKERS = (
    ("#0072B2", "o"),
    ("#D55E00", "s"),
    ("#009E73", "^"),
    ("#CC79A7", "D"),
    ("#E69F00", "v"),
    ("#56B4E9", "P"),
)


def pca_2d_with_explained_variance(vectors: Float[Tensor, "word width"]) -> tuple[Float[Tensor, "word 2"], list[float]]:
    """Project vectors onto their first two principal components, and return the explained variance ratios.

    Since the sign of a component is arbitrary, it is chosen so that the coordinate farthest from 0 is positive.
    """
    if len(vectors) < 2:
        raise ShapeError(f"at least 2 vectors are required, got {len(vectors)}")
    centered = (vectors - vectors.mean(0)).double()
    # An eigendecomposition of the covariance is 20 times as fast as an SVD of thousands of vectors.
    squares, directions = torch.linalg.eigh(centered.T @ centered)
    squares, directions = squares.flip(0).clamp(min=0), directions.flip(1)
    points = torch.zeros(len(vectors), 2, dtype=torch.float64)
    n = min(2, len(squares))
    points[:, :n] = centered @ directions[:, :n]
    farthest = points.gather(0, points.abs().argmax(0, keepdim=True))
    points = points * torch.where(farthest < 0, -1.0, 1.0)
    explained_variance = squares / squares.sum().clamp(min=1e-300)
    return points, [*explained_variance[:n].tolist(), *[0.0] * (2 - n)]


def plot_word_map(
    vectors: Float[Tensor, "word width"], words: Sequence[str], *, groups: Sequence[str] = (), title: str = ""
) -> "Figure":
    """Plot words at the 2-D projections of their vectors. Words in the same group share a color and marker."""
    if len(words) != len(vectors) or (groups and len(groups) != len(vectors)):
        raise ShapeError(
            f"these numbers must be equal, got {len(vectors)} vectors, {len(words)} words and {len(groups)} groups"
        )
    points, explained_variance = pca_2d_with_explained_variance(vectors)
    figure = new_figure(width=8.0, height=6.0)
    axis = figure.subplots()
    group_names = list(dict.fromkeys(groups)) or [""]
    point_groups = list(groups) or [""] * len(words)
    for group_index, name in enumerate(group_names):
        color, marker = COLORS_AND_MARKERS[group_index % len(COLORS_AND_MARKERS)]
        indices = [index for index, group in enumerate(point_groups) if group == name]
        axis.scatter(points[indices, 0], points[indices, 1], s=22, color=color, marker=marker, label=name or None)
    axis.margins(0.12)
    colors = [COLORS_AND_MARKERS[group_names.index(group) % len(COLORS_AND_MARKERS)][0] for group in point_groups]
    label_points(axis, points, words, colors)
    axis.axhline(0, color="0.85", linewidth=0.8, zorder=0)
    axis.axvline(0, color="0.85", linewidth=0.8, zorder=0)
    axis.set_xlabel(f"PC 1: {explained_variance[0]:.0%} of the variance")
    axis.set_ylabel(f"PC 2: {explained_variance[1]:.0%} of the variance")
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(title, fontsize="medium")
    if groups:
        axis.legend(frameon=False, fontsize="small")
    return figure


_LABEL_OFFSETS = ((6, 3), (6, -9), (-6, 3), (-6, -9), (0, 8), (0, -14), (6, 12), (-6, 12), (6, -18), (-6, -18))
"""Candidate label offsets from a point, in typographic points."""
_FONT_SIZE, _LINE_HEIGHT = 9, 10.0
"""Font size and approximate line height, in typographic points."""

Box = tuple[float, float, float, float]


def label_points(axis: "Axes", points: Tensor, words: Sequence[str], colors: Sequence[str]) -> None:
    """Label each point at the offset where the label overlaps least with the markers and earlier labels."""
    figure = axis.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # computes the layout, so that the points have their final positions
    scale = 72 / figure.dpi  # typographic points, 72 per inch
    screen_points = axis.transData.transform(points.numpy()) * scale
    occupied: list[Box] = [(x - 3, y - 3, x + 3, y + 3) for x, y in screen_points]
    for (x, y), point, word, color in zip(screen_points, points.tolist(), words, colors, strict=True):
        dx, dy, box = min(
            ((dx, dy, _label_box(x + dx, y + dy, word, side=dx)) for dx, dy in _LABEL_OFFSETS),
            key=lambda candidate: sum(_overlap_area(candidate[2], other) for other in occupied),
        )
        occupied.append(box)
        side = "center" if dx == 0 else "left" if dx > 0 else "right"
        axis.annotate(
            word,
            (point[0], point[1]),
            xytext=(dx, dy),
            textcoords="offset points",
            ha=side,
            fontsize=_FONT_SIZE,
            color=color,
        )


def _label_box(x: float, y: float, word: str, *, side: int) -> Box:
    from matplotlib.textpath import TextPath

    width = 2 + (TextPath((0, 0), word, size=_FONT_SIZE).get_extents().width if word.strip() else 0)
    left = x - width / 2 if side == 0 else x if side > 0 else x - width
    return left, y, left + width, y + _LINE_HEIGHT


def _overlap_area(first: Box, second: Box) -> float:
    wide = min(first[2], second[2]) - max(first[0], second[0])
    high = min(first[3], second[3]) - max(first[1], second[1])
    return max(0.0, wide) * max(0.0, high)
