"""Plot confusion matrices."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from qkv.inspection.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_CLASSES_WITH_COUNTS = 20
"""The maximum number of classes for which counts are shown in the cells."""

MAX_CLASSES_WITH_SHARES = 8
"""The maximum number of classes for which percentages are shown below the counts."""


def plot_confusion_matrix(
    counts: Int[np.ndarray, "true predicted"], class_names: Sequence[str], *, title: str = ""
) -> "Figure":
    """Plot a confusion matrix. Colors show the share of each true class, and numbers show the counts."""
    n = len(class_names)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    cell_size = 0.75 if n <= MAX_CLASSES_WITH_SHARES else 0.45 if n <= MAX_CLASSES_WITH_COUNTS else 0.16
    label_width = 0.085 * max(map(len, class_names)) * (1.0 if n <= MAX_CLASSES_WITH_COUNTS else 0.6)
    side = max(1.8, cell_size * n)
    labels_fit = label_width < 0.9 * side / n
    figure = new_figure(width=side + label_width + 1.6, height=side + (0.2 if labels_fit else label_width) + 0.9)
    axis = figure.subplots()
    image = axis.imshow(shares, cmap="viridis", vmin=0.0, vmax=1.0)
    size = "medium" if n <= MAX_CLASSES_WITH_COUNTS else 5
    rotation = {} if labels_fit else {"rotation": 60, "ha": "right", "rotation_mode": "anchor"}
    axis.set_xticks(range(n), class_names, fontsize=size, **rotation)
    axis.set_yticks(range(n), class_names, fontsize=size)
    axis.set_xlabel("predicted")
    axis.set_ylabel("true")
    axis.set_title(title, fontsize="medium")
    figure.colorbar(image, ax=axis, fraction=0.04, pad=0.02, label="share of the true class")
    if n <= MAX_CLASSES_WITH_COUNTS:
        for i, j in np.ndindex(n, n):
            text_color = "black" if shares[i, j] > 0.6 else "white"
            text = f"{counts[i, j]:,}\n{shares[i, j]:.0%}" if n <= MAX_CLASSES_WITH_SHARES else f"{counts[i, j]:,}"
            axis.text(j, i, text, ha="center", va="center", fontsize="small", color=text_color)
    return figure
