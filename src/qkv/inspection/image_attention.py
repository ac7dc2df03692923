"""Plot how each generated word attends to the patches of an image."""

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
    """An image, the words generated from it, and the attention from each word to the image patches."""

    image: Float[Tensor, "row column 3"]
    """RGB values from 0 to 1."""
    words: Sequence[str]
    weights: Float[Tensor, "word patch"]
    """The weight of each patch, row by row from the top left, like in `split_into_patches`."""
    patches_per_row: int
    """The number of patches per row of the image."""

    def __post_init__(self) -> None:
        n_words, n_patches = self.weights.shape
        if n_words != len(self.words) or not n_words or n_patches % self.patches_per_row:
            raise ShapeError(
                f"weights have shape {n_words}×{n_patches}, which does not match {len(self.words)} words and "
                f"{self.patches_per_row} patches per row"
            )


def plot_image_attention(*items: ImageAttention, title: str = "") -> "Figure":
    """Plot one row per image, which shows the image and then the attention of each word, all on one color scale."""
    if not items:
        raise ShapeError("at least 1 image is required, got 0")
    n_columns = 1 + max(len(item.words) for item in items)
    figure = new_figure(width=1.25 * n_columns + 0.6, height=1.42 * len(items) + 0.4)
    axes = figure.subplots(len(items), n_columns, squeeze=False)
    max_weight = max(float(item.weights.max()) for item in items)
    images = []
    for row, item in zip(axes, items, strict=True):
        for axis in row:
            axis.set_axis_off()
        row[0].imshow(item.image.numpy())
        images += [
            _draw_word_attention(row[1 + word_index], item, word_index, max_weight)
            for word_index in range(len(item.words))
        ]
    figure.colorbar(images[0], ax=axes, fraction=0.012, pad=0.01, label="attention weight")
    figure.suptitle(title, fontsize="medium")
    return figure


def _draw_word_attention(axis: "Axes", item: ImageAttention, word_index: int, max_weight: float) -> "AxesImage":
    """Draw one word's weights over a dark grayscale image. The square-root scale makes small weights visible."""
    from matplotlib.colors import PowerNorm

    n_rows, n_columns, _ = item.image.shape
    axis.imshow(0.55 * item.image.mean(-1).numpy(), cmap="gray", vmin=0, vmax=1)
    axis.set_title(item.words[word_index], fontsize=9, pad=3)
    patch_weights = item.weights[word_index].view(-1, item.patches_per_row).float()
    return axis.imshow(
        patch_weights.numpy(),
        cmap="inferno",
        norm=PowerNorm(0.5, vmin=0, vmax=max_weight),
        alpha=(0.15 + 0.85 * (patch_weights / max_weight).sqrt()).numpy(),
        extent=(-0.5, n_columns - 0.5, n_rows - 0.5, -0.5),
    )
