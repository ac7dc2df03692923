"""Heatmaps are saved in every format, are not blank, and show their values."""

import io
import sys

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from qkv.errors import MissingExtraError, ShapeError
from qkv.inspection import Heatmap, new_figure, plot_heatmaps, plot_view
from qkv.inspection.coreference import CoreferenceView

MATRIX = torch.tensor([[0.9, 0.1, 0.0], [0.25, 0.5, 0.25]])


def heatmap(matrix=MATRIX, **settings):
    rows = [f"q{i}" for i in range(matrix.shape[0])]
    columns = [f"k{i}" for i in range(matrix.shape[1])]
    return Heatmap(matrix=matrix, rows=rows, columns=columns, **settings)


def pixels(figure):
    file = io.BytesIO()
    figure.savefig(file, format="png")
    file.seek(0)
    return imread(file)


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_heatmap_is_saved_in_every_format(ending, magic, tmp_path):
    path = tmp_path / f"map.{ending}"
    plot_heatmaps(heatmap(title="head 0")).savefig(path)
    assert path.read_bytes().startswith(magic)
    assert path.stat().st_size > 2000


def test_a_heatmap_is_not_blank_and_depends_on_its_values():
    picture = pixels(plot_heatmaps(heatmap()))
    assert len(np.unique(picture.reshape(-1, picture.shape[-1]), axis=0)) > 50
    assert not np.array_equal(picture, pixels(plot_heatmaps(heatmap(MATRIX.flip(0)))))


def test_rows_and_columns_are_labeled():
    figure = plot_heatmaps(heatmap(title="head 3", row_axis="target", column_axis="source"), title="All")
    axis = figure.axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["q0", "q1"]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["k0", "k1", "k2"]
    assert (axis.get_ylabel(), axis.get_xlabel(), axis.get_title()) == ("target", "source", "head 3")
    assert figure.get_suptitle() == "All"
    assert {text.get_text() for text in axis.texts} == {"0.90", "0.10", "0.00", "0.25", "0.50"}


def test_the_image_contains_the_matrix():
    image = plot_heatmaps(heatmap()).axes[0].images[0]
    np.testing.assert_allclose(image.get_array(), MATRIX.numpy())


@pytest.mark.parametrize(
    ("matrix", "is_signed", "limits"),
    [
        ([[0.25, 0.75]], False, (0.0, 0.75)),
        ([[-5.0, -1.0]], False, (-5.0, 0.0)),
        ([[-2.0, 3.0]], False, (-2.0, 3.0)),
        ([[-5.0, 1.0]], True, (-5.0, 5.0)),
        ([[1.0, 2.0]], True, (-2.0, 2.0)),
    ],
)
def test_the_color_range_spans_the_values(matrix, is_signed, limits):
    figure = plot_heatmaps(heatmap(torch.tensor(matrix), is_signed=is_signed))
    assert figure.axes[0].images[0].get_clim() == limits


@pytest.mark.parametrize("is_signed", [False, True])
@pytest.mark.parametrize(
    "matrix",
    [
        torch.tensor([[0.0, float("-inf")], [1.0, 2.0]]),
        torch.full((2, 3), float("-inf")),
        torch.zeros(2, 3),
        torch.full((2, 3), float("nan")),
        torch.ones(1, 1, dtype=torch.bfloat16),
        torch.randn(2, 2, requires_grad=True),
    ],
    ids=["masked", "all masked", "zeros", "nan", "bfloat16", "with a graph"],
)
def test_matrices_with_special_values_are_plotted(matrix, is_signed):
    assert pixels(plot_heatmaps(heatmap(matrix, is_signed=is_signed))).std() > 0


def test_masked_cells_show_minus_infinity():
    figure = plot_heatmaps(heatmap(torch.tensor([[0.0, float("-inf")]])))
    assert [text.get_text() for text in figure.axes[0].texts] == ["0.00", "−∞"]


def test_heatmaps_are_plotted_side_by_side():
    figure = plot_heatmaps(heatmap(), heatmap(torch.randn(5, 7)))
    assert [axis.images[0].get_array().shape for axis in figure.axes[:2]] == [(2, 3), (5, 7)]


def test_cell_values_can_be_hidden_and_are_hidden_in_large_matrices():
    assert not plot_heatmaps(heatmap(show_numbers=False)).axes[0].texts
    assert not plot_heatmaps(heatmap(torch.rand(15, 15))).axes[0].texts


def test_the_number_of_labels_must_match_the_matrix():
    with pytest.raises(ShapeError, match=r"\(2, 3\).*\b3 row labels.*\b3 column labels"):
        Heatmap(matrix=MATRIX, rows="abc", columns="abc")


def test_plotting_no_heatmap_raises():
    with pytest.raises(ShapeError, match=r"\b1\b.*\b0\b"):
        plot_heatmaps()


def test_a_missing_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"matplotlib; .*pip install 'qkv\[plot\]'"):
        new_figure(width=1.0, height=1.0)


def test_a_notebook_displays_a_figure_automatically():
    assert new_figure(width=1.0, height=1.0)._repr_png_().startswith(b"\x89PNG")


def test_the_knock_out_axis_explains_its_sign():
    view = CoreferenceView(
        text="a cat it",
        pronoun="it",
        candidates=["a", "cat"],
        positions=[[2], [0], [1]],
        attention=[0.2, 0.3],
        rollout=[0.2, 0.3],
        value_weighted=[0.2, 0.3],
        knock_out=[-0.1, 0.2],
        remarks=[],
    )
    labels = [axis.get_xlabel() for axis in plot_view(view, title="a cat it").axes]
    assert all("'it'" in label for label in labels[:3])
    assert "nats" in labels[3]
    assert "negative" in labels[3]
