"""Find the keys for which a query exists that scores them highest (for the lesson layernorm-geometry)."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

TOLERANCE = 1e-9
"""Values below this count as 0; the vectors are float64 with norms of about 1."""
MAX_ITERATIONS = 1000
"""A search takes a few dozen iterations; the limit prevents an endless loop due to rounding."""


class ConvexCombination(NamedTuple):
    """Corners, as indices of points, and their convex weights."""

    corners: Int[Tensor, " corner"]
    weights: Float[Tensor, " corner"]


def find_selectable_keys(keys: Float[Tensor, "key d"]) -> Bool[Tensor, " key"]:
    """Return whether each key i has a query p with p·(kᵢ − kⱼ) > 0 for all j.

    If such a query exists, the point nearest to 0 in the convex hull of the differences is one. If the key is inside
    the convex hull of the others, that point is 0.
    """
    keys = keys.double()
    is_selectable = []
    for i, key in enumerate(keys):
        differences = key - torch.cat((keys[:i], keys[i + 1 :]))
        # If all keys have the same norm, each key selects itself, possibly by a margin too small for the search.
        is_selectable.append(
            bool((differences @ key > 0).all() or (differences @ min_norm_point(differences) > TOLERANCE).all())
        )
    return torch.tensor(is_selectable)


def min_norm_point(points: Float[Tensor, "point d"]) -> Float[Tensor, " d"]:
    """Find the point of smallest norm in the convex hull with Wolfe's algorithm (Math. Programming 11, 1976).

    The algorithm maintains a set of corners and their convex weights. Each iteration adds the corner that is farthest
    in the direction of 0 and removes corners whose weight becomes 0.
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
        # Weights that sum to 1 and minimize the norm; they may be negative.
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
