"""Plots of word attention over images."""

import pytest
import torch

from qkv.errors import ShapeError
from qkv.inspection import ImageAttention, plot_image_attention


def image_attention(n_words=3, *, n_patches=6, patches_per_row=3):
    return ImageAttention(
        image=torch.rand(10, 15, 3),
        words=[f"word {i}" for i in range(n_words)],
        weights=torch.rand(n_words, n_patches).softmax(-1),
        patches_per_row=patches_per_row,
    )


def test_each_word_has_a_panel_with_its_weights_over_the_image():
    first, second = image_attention(3), image_attention(2)
    figure = plot_image_attention(first, second, title="a title")
    panels = [axis for axis in figure.axes if axis.get_title()]
    assert [axis.get_title() for axis in panels] == [*first.words, *second.words]
    for axis, weights in zip(panels, torch.cat((first.weights, second.weights)), strict=True):
        image, overlay = axis.images
        assert torch.equal(torch.tensor(overlay.get_array()), weights.view(2, 3))
        assert overlay.get_extent() == list(image.get_extent())


def test_weights_of_the_wrong_shape_raise():
    with pytest.raises(ShapeError, match=r"3×7.*\b3 words.*\b2 patches"):
        image_attention(n_patches=7, patches_per_row=2)
    with pytest.raises(ShapeError, match=r"3×6.*\b2 words.*\b3 patches"):
        ImageAttention(image=torch.rand(10, 15, 3), words=["a", "b"], weights=torch.rand(3, 6), patches_per_row=3)
    with pytest.raises(ShapeError, match=r"0×6.*\b0 words"):
        image_attention(0)
    with pytest.raises(ShapeError, match=r"\b1 image.*\b0\b"):
        plot_image_attention()
