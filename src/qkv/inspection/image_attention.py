"""Plot the attention of each generated word over an image."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor

from qkv.errors import ShapeError
from qkv.inspection.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage


@dataclass(frozen=True, kw_only=True)
class ImageAttention:
    """An image, the words generated from it, and the attention of each word over its patches."""

    picture: Float[Tensor, "row column 3"]
    """RGB values from 0 to 1."""
    words: Sequence[str]
    weights: Float[Tensor, "word patch"]
    """Weights of the patches, row by row from the top left, in the order of `split_into_patches`."""
    n_across: int
    """Number of patches per row."""

    def __post_init__(self) -> None:
        n_words, n_patches = self.weights.shape
        if n_words != len(self.words) or not n_words or n_patches % self.n_across:
            raise ShapeError(
                f"weights have shape {n_words}×{n_patches}, which does not match "
                f"{len(self.words)} words and {self.n_across} patches per row"
            )


def plot_image_attention(*looks: ImageAttention, title: str = "") -> "Figure":
    """Plot one row per image: the image itself, then the attention of each word, all on one color scale."""
    if not looks:
        raise ShapeError("at least 1 image is required, got 0")
    n_columns = 1 + max(len(one.words) for one in looks)
    figure = new_figure(width=1.25 * n_columns + 0.6, height=1.42 * len(looks) + 0.4)
    axes = figure.subplots(len(looks), n_columns, squeeze=False)
    most = max(float(one.weights.max()) for one in looks)
    drawn = []
    for row, one in zip(axes, looks, strict=True):
        for axis in row:
            axis.set_axis_off()
        row[0].imshow(one.picture.numpy())
        drawn += [_draw_word_attention(row[1 + number], one, number, most) for number in range(len(one.words))]
    figure.colorbar(drawn[0], ax=axes, fraction=0.012, pad=0.01, label="attention weight")
    figure.suptitle(title, fontsize="medium")
    return figure


def _draw_word_attention(axis: "Axes", one: ImageAttention, number: int, most: float) -> "AxesImage":
    """Draw a dark grayscale image under one word's weights. The square-root scale makes small weights visible."""
    from matplotlib.colors import PowerNorm

    n_rows, n_columns, _ = one.picture.shape
    axis.imshow(0.55 * one.picture.mean(-1).numpy(), cmap="gray", vmin=0, vmax=1)
    axis.set_title(one.words[number], fontsize=9, pad=3)
    table = one.weights[number].view(-1, one.n_across).float()
    return axis.imshow(
        table.numpy(),
        cmap="inferno",
        norm=PowerNorm(0.5, vmin=0, vmax=most),
        alpha=(0.15 + 0.85 * (table / most).sqrt()).numpy(),
        extent=(-0.5, n_columns - 0.5, n_rows - 0.5, -0.5),
    )
