"""Tests of image patches."""

import pytest
import torch

from qkv.data.patches import split_into_patches
from qkv.errors import InputError, ShapeError
from qkv.nn import PatchProjection


def test_each_patch_holds_its_own_square_row_by_row_from_the_top_left():
    pictures = torch.rand(2, 6, 9, 5)
    patches = split_into_patches(pictures, 3)
    assert patches.shape == (2, 2 * 3, 3 * 3 * 5)
    for row in range(2):
        for column in range(3):
            square = pictures[:, 3 * row : 3 * row + 3, 3 * column : 3 * column + 3]
            assert torch.equal(patches[:, 3 * row + column], square.flatten(1))


def test_an_image_that_is_not_divisible_into_patches_is_rejected():
    with pytest.raises(ShapeError, match=r"6×7.*3×3"):
        split_into_patches(torch.rand(1, 6, 7, 1), 3)


def test_integer_patches_are_rejected():
    with pytest.raises(InputError, match=r"patches\b.*torch\.uint8"):
        PatchProjection(13, 7).check(torch.ones(3, 5, 13, dtype=torch.uint8))
