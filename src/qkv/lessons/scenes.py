"""Draw random images of two shapes, with captions, for the lesson `pictures`."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from qkv.data.patches import split_into_patches
from qkv.tensors import Ids, Patches

SIDE, PATCH = 36, 4
"""Side lengths of an image and of a patch, in pixels."""
PATCHES_PER_ROW = SIDE // PATCH

BACKGROUND = np.array([0.07, 0.08, 0.11], np.float32)
COLORS = {
    "red": (0.90, 0.27, 0.22),
    "blue": (0.25, 0.52, 0.95),
    "green": (0.20, 0.75, 0.45),
    "yellow": (0.96, 0.82, 0.25),
    "white": (0.93, 0.93, 0.95),
}
SHAPES = ("square", "circle", "triangle", "cross")
RELATIONS = ("left of", "above")
BEGIN, END = "<begin>", "<end>"
CAPTION_WORDS = (BEGIN, END, "a", *COLORS, *SHAPES, *RELATIONS)

_N_CHOICES = (len(COLORS), len(SHAPES), len(COLORS), len(SHAPES))
_PAIRS = np.random.default_rng(0).permutation(int(np.prod(_N_CHOICES)))
UNSEEN_PAIRS, SEEN_PAIRS = np.split(_PAIRS, [len(_PAIRS) // 5])
"""Indices of pairs of colored shapes. `SEEN_PAIRS` are used for training; `UNSEEN_PAIRS` are held out."""


@dataclass(frozen=True, kw_only=True)
class Scenes:
    """A batch of images with their captions."""

    images: Float[Tensor, "scene row column channel"]
    captions: Ids
    """Indices into `CAPTION_WORDS`. An example is “a red square left of a blue circle <end>”."""
    shape_patches: Bool[Tensor, "scene 2 patch"]
    """Whether each patch contains the first shape and whether it contains the second shape.

    If a patch contains both shapes, it is assigned to the shape that covers more of the patch.
    """

    @cached_property
    def patches(self) -> Patches:
        return split_into_patches(self.images, PATCH)


def draw_scenes(n: int, *, rng: np.random.Generator, pairs: NDArray[np.int64] = SEEN_PAIRS) -> Scenes:
    """Draw n random images and their captions.

    If the shapes are side by side, the caption names the left one first. Otherwise, it names the upper one first.
    """
    color, shape, other_color, other_shape = np.unravel_index(rng.choice(pairs, n), _N_CHOICES)
    relation = rng.integers(len(RELATIONS), size=n)
    first, second = _sample_shape_pair_centers(relation, rng)
    coverage = np.stack(
        (_pixel_coverage_at_random_size(shape, first, rng), _pixel_coverage_at_random_size(other_shape, second, rng))
    )
    colors = np.array(list(COLORS.values()), np.float32)[np.stack((color, other_color))] - BACKGROUND
    a, end = (np.full(n, CAPTION_WORDS.index(word)) for word in ("a", END))
    first_color, first_shape, first_relation = (
        CAPTION_WORDS.index(kind[0]) for kind in (list(COLORS), SHAPES, RELATIONS)
    )
    caption = (
        a,
        first_color + color,
        first_shape + shape,
        first_relation + relation,
        a,
        first_color + other_color,
        first_shape + other_shape,
        end,
    )
    first_cover, second_cover = (
        split_into_patches(torch.from_numpy(pixels[..., None]), PATCH).sum(-1) for pixels in coverage
    )
    return Scenes(
        images=torch.from_numpy(BACKGROUND + (coverage[..., None] * colors[:, :, None, None]).sum(0)),
        captions=torch.from_numpy(np.stack(caption, 1)),
        shape_patches=torch.stack(
            ((first_cover >= second_cover) & (first_cover > 0), second_cover > first_cover), dim=1
        ),
    )


def ids_to_words(ids: list[int]) -> list[str]:
    """Convert ids to words, omitting the end token."""
    return [CAPTION_WORDS[i] for i in ids if CAPTION_WORDS[i] != END]


def _sample_shape_pair_centers(relation: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Sample the centers of both shapes, measured in patches.

    The centers are at least three patches apart in one direction and at most one patch apart in the other.
    """
    n = len(relation)
    distance = rng.integers(3, PATCHES_PER_ROW - 3, size=n)
    along = 2 + rng.integers(PATCHES_PER_ROW - 3 - distance)
    across = rng.integers(2, PATCHES_PER_ROW - 1, size=n)
    other = np.clip(across + rng.integers(-1, 2, size=n), 2, PATCHES_PER_ROW - 2)
    centers = np.array([[across, along], [other, along + distance]]).swapaxes(1, 2)
    return np.where((relation == 0)[:, None], centers, centers[..., ::-1])


def _pixel_coverage_at_random_size(
    shape: NDArray[np.int64], centers: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.float32]:
    """Return the fraction of each pixel that a shape covers when it is drawn in a random one of three sizes."""
    n, width = len(shape), _STAMPS.shape[-1]
    coverage = np.zeros((n, SIDE, SIDE), np.float32)
    rows, columns = (PATCH * centers - width // 2)[:, :, None].transpose(1, 0, 2) + np.arange(width)
    coverage[np.arange(n)[:, None, None], rows[:, :, None], columns[:, None]] = _STAMPS[rng.integers(3, size=n), shape]
    return coverage


def _rasterize_shapes_in_all_sizes() -> NDArray[np.float32]:
    """Draw every shape in each of the three sizes."""
    radius = np.array([3.5, 4.5, 5.5])[:, None, None]
    x = (np.arange(12) - 5.5) / radius
    y = x.swapaxes(1, 2)
    # Values below 1 are inside the shape, and y points down. The shapes are in the order of SHAPES.
    square, circle = np.maximum(abs(x), abs(y)) / 0.9, np.hypot(x, y)
    triangle = np.maximum(y / 0.8, abs(x) / 0.55 - y)
    cross = np.minimum(np.maximum(abs(x) / 0.34, abs(y)), np.maximum(abs(x), abs(y) / 0.34))
    outside = np.stack([square, circle, triangle, cross], 1)
    return np.clip(0.5 + (1 - outside) * radius[:, None], 0, 1).astype(np.float32)  # edges are about one pixel wide


_STAMPS = _rasterize_shapes_in_all_sizes()
