"""What is there to see? Pictures of two shapes, with what one says of them, drawn without end."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from qkv.nn import split_into_patches
from qkv.tensors import Ids, Patches

SIDE, PATCH = 36, 4
"""Pixels of a picture's side, and of a patch's."""
N_ACROSS = SIDE // PATCH

GROUND = np.array([0.07, 0.08, 0.11], np.float32)
COLOURS = {
    "red": (0.90, 0.27, 0.22), "blue": (0.25, 0.52, 0.95), "green": (0.20, 0.75, 0.45), "yellow": (0.96, 0.82, 0.25),
    "white": (0.93, 0.93, 0.95),
}  # fmt: skip
SHAPES = ("square", "circle", "triangle", "cross")
RELATIONS = ("left of", "above")
BEGIN, END = "<begin>", "<end>"
WORDS = (BEGIN, END, "a", *COLOURS, *SHAPES, *RELATIONS)

_EACH = (len(COLOURS), len(SHAPES), len(COLOURS), len(SHAPES))
_PAIRS = np.random.default_rng(0).permutation(int(np.prod(_EACH)))
UNSEEN, SEEN = np.split(_PAIRS, [len(_PAIRS) // 5])
"""Which two shapes, in order: those that training never shows together, and the rest."""


@dataclass(frozen=True, kw_only=True)
class Scenes:
    pictures: Float[Tensor, "scene row column colour"]
    captions: Ids
    """In WORDS: a red square, left of, a blue circle, <end>."""
    inked: Bool[Tensor, "scene 2 patch"]
    """Which patches show the first shape, and which the second; where both, the one that covers more."""

    @cached_property
    def patches(self) -> Patches:
        return split_into_patches(self.pictures, PATCH)


def draw_scenes(n: int, *, chance: np.random.Generator, among: NDArray[np.int64] = SEEN) -> Scenes:
    """Shapes are told apart by the direction in which they lie farther apart: first the left one, or the upper one."""
    colour, shape, other_colour, other_shape = np.unravel_index(chance.choice(among, n), _EACH)
    relation = chance.integers(len(RELATIONS), size=n)
    first, second = _places(relation, chance)
    inks = np.stack((_ink(shape, first, chance), _ink(other_shape, second, chance)))
    colours = np.array(list(COLOURS.values()), np.float32)[np.stack((colour, other_colour))] - GROUND
    a, end = (np.full(n, WORDS.index(word)) for word in ("a", END))
    first_colour, first_shape, first_relation = (WORDS.index(kind[0]) for kind in (list(COLOURS), SHAPES, RELATIONS))
    caption = (a, first_colour + colour, first_shape + shape, first_relation + relation,
               a, first_colour + other_colour, first_shape + other_shape, end)  # fmt: skip
    one, other = (split_into_patches(torch.from_numpy(ink[..., None]), PATCH).sum(-1) for ink in inks)
    return Scenes(
        pictures=torch.from_numpy(GROUND + (inks[..., None] * colours[:, :, None, None]).sum(0)),
        captions=torch.from_numpy(np.stack(caption, 1)),
        inked=torch.stack(((one >= other) & (one > 0), other > one), dim=1),
    )


def words_of(ids: list[int]) -> list[str]:
    """Without the end."""
    return [WORDS[i] for i in ids if WORDS[i] != END]


def _places(relation: NDArray[np.int64], chance: np.random.Generator) -> NDArray[np.int64]:
    """Centres, in patches: (shape, scene, row and column). One way three or more apart, the other way one at most."""
    n = len(relation)
    apart = chance.integers(3, N_ACROSS - 3, size=n)
    along = 2 + chance.integers(N_ACROSS - 3 - apart)
    across = chance.integers(2, N_ACROSS - 1, size=n)
    other = np.clip(across + chance.integers(-1, 2, size=n), 2, N_ACROSS - 2)
    places = np.array([[across, along], [other, along + apart]]).swapaxes(1, 2)
    return np.where((relation == 0)[:, None], places, places[..., ::-1])


def _ink(shape: NDArray[np.int64], at: NDArray[np.int64], chance: np.random.Generator) -> NDArray[np.float32]:
    """How much of each pixel a shape covers, in one of three sizes."""
    n, width = len(shape), _STAMPS.shape[-1]
    ink = np.zeros((n, SIDE, SIDE), np.float32)
    rows, columns = (PATCH * at - width // 2)[:, :, None].transpose(1, 0, 2) + np.arange(width)
    ink[np.arange(n)[:, None, None], rows[:, :, None], columns[:, None]] = _STAMPS[chance.integers(3, size=n), shape]
    return ink


def _stamps() -> NDArray[np.float32]:
    """Each shape in each size, alone."""
    radius = np.array([3.5, 4.5, 5.5])[:, None, None]
    x = (np.arange(12) - 5.5) / radius
    y = x.swapaxes(1, 2)
    # Less than 1 inside, more outside; y goes down. In the order of SHAPES.
    square, circle = np.maximum(abs(x), abs(y)) / 0.9, np.hypot(x, y)
    triangle = np.maximum(y / 0.8, abs(x) / 0.55 - y)
    cross = np.minimum(np.maximum(abs(x) / 0.34, abs(y)), np.maximum(abs(x), abs(y) / 0.34))
    outside = np.stack([square, circle, triangle, cross], 1)
    return np.clip(0.5 + (1 - outside) * radius[:, None], 0, 1).astype(np.float32)  # an edge is about a pixel wide


_STAMPS = _stamps()
