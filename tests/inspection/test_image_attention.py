"""Pictures of where words look in a picture."""

import pytest
import torch

from qkv.errors import ShapeError
from qkv.inspection import ImageAttention, plot_image_attention


def looks(n_words=3, *, n_patches=6, n_across=3):
    return ImageAttention(
        image=torch.rand(10, 15, 3),
        words=[f"word {i}" for i in range(n_words)],
        weights=torch.rand(n_words, n_patches).softmax(-1),
        patches_per_row=n_across,
    )


def test_each_word_has_the_picture_with_its_own_weights_where_its_patches_are():
    one, other = looks(3), looks(2)
    figure = plot_image_attention(one, other, title="a title")
    panels = [axis for axis in figure.axes if axis.get_title()]
    assert [axis.get_title() for axis in panels] == [*one.words, *other.words]
    for axis, weights in zip(panels, torch.cat((one.weights, other.weights)), strict=True):
        below, heat = axis.images
        assert torch.equal(torch.tensor(heat.get_array()), weights.view(2, 3))
        assert heat.get_extent() == list(below.get_extent())


def test_weights_that_do_not_fit_are_refused():
    with pytest.raises(ShapeError, match=r"3×7.*\b3 words.*\b2 patches"):
        looks(n_patches=7, n_across=2)
    with pytest.raises(ShapeError, match=r"3×6.*\b2 words.*\b3 patches"):
        ImageAttention(image=torch.rand(10, 15, 3), words=["a", "b"], weights=torch.rand(3, 6), patches_per_row=3)
    with pytest.raises(ShapeError, match=r"0×6.*\b0 words"):
        looks(0)
    with pytest.raises(ShapeError, match=r"\b1 image.*\b0\b"):
        plot_image_attention()
