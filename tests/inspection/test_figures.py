"""The heat map: saved in every format, not blank, and its numbers where they belong."""

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


def one(matrix=MATRIX, **settings):
    rows = [f"q{i}" for i in range(matrix.shape[0])]
    columns = [f"k{i}" for i in range(matrix.shape[1])]
    return Heatmap(matrix=matrix, rows=rows, columns=columns, **settings)


def pixels(plot_view):
    file = io.BytesIO()
    plot_view.savefig(file, format="png")
    file.seek(0)
    return imread(file)


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_heat_map_is_saved_in_every_format(ending, magic, tmp_path):
    path = tmp_path / f"map.{ending}"
    plot_heatmaps(one(title="head 0")).savefig(path)
    assert path.read_bytes().startswith(magic)
    assert path.stat().st_size > 2000


def test_a_heat_map_is_not_blank_and_shows_its_numbers():
    picture = pixels(plot_heatmaps(one()))
    assert len(np.unique(picture.reshape(-1, picture.shape[-1]), axis=0)) > 50
    assert not np.array_equal(picture, pixels(plot_heatmaps(one(MATRIX.flip(0)))))


def test_rows_and_columns_are_labelled():
    plot_view = plot_heatmaps(one(title="head 3", row_axis="target", column_axis="source"), title="All")
    axis = plot_view.axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["q0", "q1"]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["k0", "k1", "k2"]
    assert (axis.get_ylabel(), axis.get_xlabel(), axis.get_title()) == ("target", "source", "head 3")
    assert plot_view.get_suptitle() == "All"
    assert {text.get_text() for text in axis.texts} == {"0.90", "0.10", "0.00", "0.25", "0.50"}


def test_the_picture_holds_the_matrix_row_by_row():
    image = plot_heatmaps(one()).axes[0].images[0]
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
def test_colours_span_the_values(matrix, is_signed, limits):
    plot_view = plot_heatmaps(one(torch.tensor(matrix), is_signed=is_signed))
    assert plot_view.axes[0].images[0].get_clim() == limits


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
def test_hard_matrices_are_drawn_too(matrix, is_signed):
    assert pixels(plot_heatmaps(one(matrix, is_signed=is_signed))).std() > 0


def test_what_the_mask_forbids_says_so():
    plot_view = plot_heatmaps(one(torch.tensor([[0.0, float("-inf")]])))
    assert [text.get_text() for text in plot_view.axes[0].texts] == ["0.00", "−∞"]


def test_maps_stand_side_by_side():
    plot_view = plot_heatmaps(one(), one(torch.randn(5, 7)))
    assert [axis.images[0].get_array().shape for axis in plot_view.axes[:2]] == [(2, 3), (5, 7)]


def test_numbers_can_be_left_out_and_are_where_there_are_too_many():
    assert not plot_heatmaps(one(show_numbers=False)).axes[0].texts
    assert not plot_heatmaps(one(torch.rand(15, 15))).axes[0].texts


def test_labels_must_fit_the_matrix():
    with pytest.raises(ShapeError, match=r"the matrix is \(2, 3\), there are 3 row labels and 3 column labels"):
        Heatmap(matrix=MATRIX, rows="abc", columns="abc")


def test_no_map_is_refused():
    with pytest.raises(ShapeError, match="0 heat maps were given, there must be at least 1"):
        plot_heatmaps()


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"figures need matplotlib: pip install 'qkv\[plot\]'"):
        new_figure(width=1.0, height=1.0)


def test_a_notebook_shows_a_figure_by_itself():
    assert new_figure(width=1.0, height=1.0)._repr_png_().startswith(b"\x89PNG")


def test_the_knock_outs_axis_says_which_sign_means_that_a_look_was_needed():
    view = CoreferenceView(
        text="a cat it",
        pronoun="it",
        candidates=["a", "cat"],
        places=[[2], [0], [1]],
        attention=[0.2, 0.3],
        rollout=[0.2, 0.3],
        value_weighted=[0.2, 0.3],
        knock_out=[-0.1, 0.2],
        remarks=[],
    )
    labels = [axis.get_xlabel() for axis in plot_view(view, title="a cat it").axes]
    assert labels == ["share of 'it'"] * 3 + ["change of log p (nats)\nbelow 0: the look was needed"]
