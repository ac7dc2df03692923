"""Find the keys that receive the highest score for at least one query (for the lesson `layernorm-geometry`)."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

TOLERANCE = 1e-9
"""Tolerance below which values are treated as 0. The vectors are float64 and have norms of about 1."""
MAX_ITERATIONS = 1000
"""Limit that prevents an infinite loop caused by rounding errors. A search typically takes a few dozen iterations."""


class ConvexCombination(NamedTuple):
    """A convex combination of corners, which are given as indices of points, with their weights."""

    corners: Int[Tensor, " corner"]
    weights: Float[Tensor, " corner"]


def find_selectable_keys(keys: Float[Tensor, "key d"]) -> Bool[Tensor, " key"]:
    """Return, for each key i, whether a query p exists such that p·(kᵢ − kⱼ) > 0 for all j ≠ i.

    If such a query exists, the point nearest to 0 in the convex hull of the differences kᵢ − kⱼ is such a query. If the
    key is inside the convex hull of the other keys, this point is 0, and no such query exists.
    """
    keys = keys.double()
    is_selectable = []
    for i, key in enumerate(keys):
        differences = key - torch.cat((keys[:i], keys[i + 1 :]))
        # If all keys have the same norm, each key selects itself, but the margin may be too small for the search.
        is_selectable.append(
            bool((differences @ key > 0).all() or (differences @ min_norm_point(differences) > TOLERANCE).all())
        )
    return torch.tensor(is_selectable)


def min_norm_point(points: Float[Tensor, "point d"]) -> Float[Tensor, " d"]:
    """Find the point with the smallest norm in the convex hull of the points.

    Wolfe's algorithm (Math. Programming 11, 1976) maintains a set of corners and their convex weights. Each iteration
    adds the point that is farthest in the direction of 0 and removes the corners whose weights become 0.
    """
    corners = points.norm(dim=1).argmin()[None]
    weights = points.new_ones(1)
    nearest = points[corners[0]]
    for _ in range(MAX_ITERATIONS):
        best = (points @ nearest).argmin()
        if points[best] @ nearest > nearest @ nearest - TOLERANCE or (corners == best).any():
            break
        corners = torch.cat((corners, best[None]))
        corners, weights = _minimize_norm_and_drop_corners(points, corners, torch.cat((weights, weights.new_zeros(1))))
        nearest = weights @ points[corners]
    return nearest


def _minimize_norm_and_drop_corners(
    points: Float[Tensor, "point d"], corners: Int[Tensor, " corner"], weights: Float[Tensor, " corner"]
) -> ConvexCombination:
    """Find the convex weights that minimize the norm of the combination, and drop corners with weight 0."""
    while True:
        corner_points = points[corners]
        # These weights sum to 1 and minimize the norm, but they may be negative.
        free = torch.linalg.lstsq(
            corner_points @ corner_points.T + 1, torch.ones(len(corners), 1).to(corner_points)
        ).solution[:, 0]
        free = free / free.sum()
        if (free > TOLERANCE).all():
            return ConvexCombination(corners, free)
        is_removed = free <= TOLERANCE
        step = (weights[is_removed] / (weights[is_removed] - free[is_removed]).clamp(min=TOLERANCE)).min().clamp(max=1)
        weights = (1 - step) * weights + step * free
        is_positive = weights > TOLERANCE
        corners, weights = corners[is_positive], weights[is_positive] / weights[is_positive].sum()
