"""The common style of all lesson figures: a colorblind-safe palette and plain axes."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:
    # matplotlib is an optional dependency, so lessons must run without it if no figure is drawn.
    Axes = Figure = object

DrawFigure = Callable[[], Figure]
"""Type of the figure-drawing function that a lesson returns."""

BLUE, ORANGE, GREEN, PINK, SKY, RED, BLACK = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000",
)  # fmt: skip
"""The Okabe–Ito palette."""


def style_and_label_axes(axes: Axes, *, title: str, x: str, y: str) -> None:
    """Set the title and axis labels, and hide the top and right borders."""
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
