"""Which keys can a query select, that is, score higher than all others? For the lesson layernorm-geometry."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

SMALL = 1e-9
"""What counts as 0 among float64 numbers of size 1."""
MAX_ROUNDS = 1000
"""Far more than the few tens that a search takes; rounding could make it go in circles."""


def selectable(keys: Float[Tensor, "key d"]) -> Bool[Tensor, " key"]:
    """A query p selects key i when p·(kᵢ − kⱼ) > 0 for all j.

    If there is such a p at all, the point of the differences' hull nearest to 0 is one; where the key lies within
    the hull of the others, that point is 0 itself.
    """
    keys = keys.double()
    found = []
    for i, key in enumerate(keys):
        apart = key - torch.cat((keys[:i], keys[i + 1 :]))
        # Of equally long keys each selects itself, by a margin that may be too small for the search.
        found.append(bool((apart @ key > 0).all() or (apart @ nearest_to_zero(apart) > SMALL).all()))
    return torch.tensor(found)


def nearest_to_zero(points: Float[Tensor, "point d"]) -> Float[Tensor, " d"]:
    """The point of the hull nearest to 0, by Wolfe's algorithm (Math. Programming 11, 1976): exact, in few steps.

    It keeps a few corners and the shares in which they mix; each round takes in the corner that lies farthest
    towards 0, and drops those whose share falls to 0.
    """
    corners = points.norm(dim=1).argmin()[None]
    shares = points.new_ones(1)
    nearest = points[corners[0]]
    for _ in range(MAX_ROUNDS):
        best = (points @ nearest).argmin()
        if points[best] @ nearest > nearest @ nearest - SMALL or (corners == best).any():
            break
        corners = torch.cat((corners, best[None]))
        corners, shares = _mixed_best(points, corners, torch.cat((shares, shares.new_zeros(1))))
        nearest = shares @ points[corners]
    return nearest


def _mixed_best(points: Tensor, corners: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """The shares (none negative) that bring the mix of the corners nearest to 0, without corners of share 0."""
    while True:
        chosen = points[corners]
        # Shares that sum to 1 and minimise the mix's length, negative ones allowed.
        free = torch.linalg.lstsq(chosen @ chosen.T + 1, torch.ones(len(corners), 1).to(chosen)).solution[:, 0]
        free = free / free.sum()
        if (free > SMALL).all():
            return corners, free
        falling = free <= SMALL
        step = (shares[falling] / (shares[falling] - free[falling]).clamp(min=SMALL)).min().clamp(max=1)
        shares = (1 - step) * shares + step * free
        kept = shares > SMALL
        corners, shares = corners[kept], shares[kept] / shares[kept].sum()
