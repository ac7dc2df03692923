"""Values in heatmap cells are legible."""

import torch

from qkv.inspection import Heatmap, plot_heatmaps


def test_non_finite_values_are_printed_in_black():
    matrix = torch.tensor([[float("nan"), float("-inf"), 0.0, 1.0]])
    figure = plot_heatmaps(Heatmap(matrix=matrix, rows=["q"], columns=list("abcd")))
    texts = {text.get_text(): text.get_color() for text in figure.axes[0].texts}
    assert texts == {"NaN": "black", "−∞": "black", "0.00": "white", "1.00": "black"}
