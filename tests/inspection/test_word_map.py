"""A map of vectors: the directions of greatest spread, the same each time, and words that can be read."""

import io

import pytest
import torch
from matplotlib.image import imread

from qkv.errors import ShapeError
from qkv.inspection.word_map import plot_word_map, project_to_2d

WORDS = ["king", "queen", "dog", "cat", "red"]


def vectors(n=5, width=7, seed=0):
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


def test_the_points_are_the_two_directions_of_greatest_spread():
    """Against the eigenvectors of the covariance; a direction's sign is free."""
    given = vectors(23)
    points, spread = project_to_2d(given)
    centred = (given - given.mean(0)).double()
    values, directions = torch.linalg.eigh(centred.T @ centred)
    expected = centred @ directions[:, [-1, -2]]
    torch.testing.assert_close(points.abs(), expected.abs())
    assert spread == pytest.approx((values[[-1, -2]] / values.sum()).tolist())


def test_vectors_on_a_plane_keep_their_distances():
    flat = torch.nn.functional.pad(vectors(6, 2), (0, 3))
    points, spread = project_to_2d(flat)
    torch.testing.assert_close(torch.cdist(points, points), torch.cdist(flat, flat).double(), rtol=1e-4, atol=1e-4)
    assert sum(spread) == pytest.approx(1)


def test_the_sign_does_not_hang_on_the_library():
    points, _ = project_to_2d(vectors())
    other, _ = project_to_2d(-vectors())
    assert (points.gather(0, points.abs().argmax(0, keepdim=True)) > 0).all()
    torch.testing.assert_close(points.abs(), other.abs())


def test_two_vectors_and_equal_vectors_have_a_map():
    points, spread = project_to_2d(vectors(2))
    assert spread == pytest.approx([1, 0])
    assert points[:, 1].abs().max() < 1e-6
    assert project_to_2d(torch.ones(3, 2))[0].abs().max() == 0
    with pytest.raises(ShapeError, match=r"\b2 vectors.*\b1\b"):
        project_to_2d(vectors(1))


def test_every_word_stands_on_the_map_and_groups_in_the_legend():
    figure = plot_word_map(vectors(), WORDS, groups=["a", "a", "b", "b", "c"], title="T")
    (axis,) = figure.axes
    assert [text.get_text() for text in axis.texts] == WORDS
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["a", "b", "c"]
    file = io.BytesIO()
    figure.savefig(file, format="png")
    file.seek(0)
    assert (imread(file)[..., :3].min(-1) < 0.9).mean() > 0.01


def test_words_of_points_that_lie_together_do_not_cover_each_other():
    given = torch.tensor([[0.0, 0.0], [0.01, 0.0], [5.0, 5.0], [-5.0, 4.0]])
    figure = plot_word_map(given, ["queen", "princess", "a", "b"])
    figure.draw_without_rendering()
    one, other = (text.get_window_extent() for text in figure.axes[0].texts[:2])
    assert not one.overlaps(other)


def test_wide_letters_are_not_written_over():
    figure = plot_word_map(
        torch.tensor([[0.0, 0.0], [0.6, 0.0], [5.0, 5.0], [-5.0, 4.0]]), ["wommmman", "girl", "a", "b"]
    )
    figure.draw_without_rendering()
    one, other = (text.get_window_extent() for text in figure.axes[0].texts[:2])
    assert not one.overlaps(other)


def test_each_vector_needs_its_word():
    with pytest.raises(ShapeError, match="5 vectors, 4 words and 0 groups"):
        plot_word_map(vectors(), WORDS[:4])
