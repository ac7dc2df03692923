"""Which part of a picture does each word come from? The picture once more for every word, lit where the word looked."""

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
    """One picture, the words that were written of it, and where each of them looked."""

    picture: Float[Tensor, "row column 3"]
    """Red, green and blue, from 0 to 1."""
    words: Sequence[str]
    weights: Float[Tensor, "word patch"]
    """Patches row by row from the top left, as `cut_in_patches` cuts them."""
    n_across: int
    """Patches side by side."""

    def __post_init__(self) -> None:
        n_words, n_patches = self.weights.shape
        if n_words != len(self.words) or not n_words or n_patches % self.n_across:
            raise ShapeError(
                f"the weights are {n_words}×{n_patches}; there are {len(self.words)} words, "
                f"and {self.n_across} patches side by side"
            )


def plot_image_attention(*looks: ImageAttention, title: str = "") -> "Figure":
    """A row for each picture: itself, then once for each word. One scale for all."""
    if not looks:
        raise ShapeError("0 pictures were given, there must be at least 1")
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
    """The picture, dark and grey, under the weights. The square root lets small weights be seen."""
    from matplotlib.colors import PowerNorm

    n_rows, n_columns, _ = one.picture.shape
    axis.imshow(0.55 * one.picture.mean(-1).numpy(), cmap="gray", vmin=0, vmax=1)
    axis.set_title(one.words[number], fontsize=9, pad=3)
    table = one.weights[number].view(-1, one.n_across).float()
    return axis.imshow(
        table.numpy(), cmap="inferno", norm=PowerNorm(0.5, vmin=0, vmax=most),
        alpha=(0.15 + 0.85 * (table / most).sqrt()).numpy(), extent=(-0.5, n_columns - 0.5, n_rows - 0.5, -0.5),
    )  # fmt: skip
