"""Confusion matrix plots show counts, shares and class names."""

import numpy as np
import pytest

from qkv.inspection.confusion import plot_confusion_matrix


def test_cells_show_counts_and_colors_show_shares_of_the_true_class():
    axis, *_ = plot_confusion_matrix(np.array([[30, 10], [0, 0]]), ["no", "yes"], title="t").axes
    assert [text.get_text() for text in axis.texts] == ["30\n75%", "10\n25%", "0\n0%", "0\n0%"]
    assert axis.images[0].get_array().tolist() == [[0.75, 0.25], [0.0, 0.0]]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["no", "yes"]
    assert (axis.get_xlabel(), axis.get_ylabel(), axis.get_title()) == ("predicted", "true", "t")


@pytest.mark.parametrize("n", [3, 77])
def test_many_classes_are_plotted_without_counts(n, tmp_path):
    figure = plot_confusion_matrix(np.eye(n, dtype=int) * 7, [f"class_{i}" for i in range(n)])
    assert bool(figure.axes[0].texts) == (n == 3)
    figure.savefig(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
