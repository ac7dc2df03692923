"""Word maps use the principal components, are deterministic and have legible labels."""

import io

import pytest
import torch
from matplotlib.image import imread

from qkv.errors import ShapeError
from qkv.inspection.word_map import pca_2d_with_explained_variance, plot_word_map

WORDS = ["king", "queen", "dog", "cat", "red"]


def vectors(n=5, width=7, seed=0):
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


def test_the_points_are_the_first_two_principal_components():
    """Compared with the eigenvectors of the covariance, up to the sign."""
    points_in = vectors(23)
    points, explained_variance = pca_2d_with_explained_variance(points_in)
    centered = (points_in - points_in.mean(0)).double()
    values, directions = torch.linalg.eigh(centered.T @ centered)
    expected = centered @ directions[:, [-1, -2]]
    torch.testing.assert_close(points.abs(), expected.abs())
    assert explained_variance == pytest.approx((values[[-1, -2]] / values.sum()).tolist())


def test_vectors_in_a_plane_keep_their_distances():
    flat = torch.nn.functional.pad(vectors(6, 2), (0, 3))
    points, explained_variance = pca_2d_with_explained_variance(flat)
    torch.testing.assert_close(torch.cdist(points, points), torch.cdist(flat, flat).double(), rtol=1e-4, atol=1e-4)
    assert sum(explained_variance) == pytest.approx(1)


def test_the_sign_is_deterministic():
    points, _ = pca_2d_with_explained_variance(vectors())
    second, _ = pca_2d_with_explained_variance(-vectors())
    assert (points.gather(0, points.abs().argmax(0, keepdim=True)) > 0).all()
    torch.testing.assert_close(points.abs(), second.abs())


def test_two_vectors_and_equal_vectors_can_be_projected():
    points, explained_variance = pca_2d_with_explained_variance(vectors(2))
    assert explained_variance == pytest.approx([1, 0])
    assert points[:, 1].abs().max() < 1e-6
    assert pca_2d_with_explained_variance(torch.ones(3, 2))[0].abs().max() == 0
    with pytest.raises(ShapeError, match=r"\b2 vectors.*\b1\b"):
        pca_2d_with_explained_variance(vectors(1))


def test_the_map_shows_every_word_and_the_legend_shows_the_groups():
    figure = plot_word_map(vectors(), WORDS, groups=["a", "a", "b", "b", "c"], title="T")
    (axis,) = figure.axes
    assert [text.get_text() for text in axis.texts] == WORDS
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["a", "b", "c"]
    file = io.BytesIO()
    figure.savefig(file, format="png")
    file.seek(0)
    assert (imread(file)[..., :3].min(-1) < 0.9).mean() > 0.01


def test_labels_of_close_points_do_not_overlap():
    points_in = torch.tensor([[0.0, 0.0], [0.01, 0.0], [5.0, 5.0], [-5.0, 4.0]])
    figure = plot_word_map(points_in, ["queen", "princess", "a", "b"])
    figure.draw_without_rendering()
    first, second = (text.get_window_extent() for text in figure.axes[0].texts[:2])
    assert not first.overlaps(second)


def test_wide_labels_do_not_overlap():
    figure = plot_word_map(
        torch.tensor([[0.0, 0.0], [0.6, 0.0], [5.0, 5.0], [-5.0, 4.0]]), ["wommmman", "girl", "a", "b"]
    )
    figure.draw_without_rendering()
    first, second = (text.get_window_extent() for text in figure.axes[0].texts[:2])
    assert not first.overlaps(second)


def test_the_number_of_words_must_match_the_vectors():
    with pytest.raises(ShapeError, match="5 vectors, 4 words and 0 groups"):
        plot_word_map(vectors(), WORDS[:4])
