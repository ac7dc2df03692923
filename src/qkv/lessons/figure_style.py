"""How every lesson's picture looks: colours that the colour-blind can tell apart, quiet axes."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:
    # matplotlib is an extra: a lesson that draws nothing must run without it.
    Axes = Figure = object

DrawFigure = Callable[[], Figure]
"""What a lesson returns: draws its picture when asked."""

BLUE, ORANGE, GREEN, PINK, SKY, RED, BLACK = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000",
)  # fmt: skip
"""The palette of Okabe and Ito."""


def label_axes(axes: Axes, *, title: str, x: str, y: str) -> None:
    """Title and axis names, and no frame where there is nothing to frame."""
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
