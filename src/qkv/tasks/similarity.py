"""Which vectors are nearest to which?"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SimilarText:
    index: int
    """Among the texts that were compared, from 0."""
    cosine: float


def find_nearest(
    queries: Float[Tensor, "query d_model"], among: Float[Tensor, "text d_model"], *, n: int
) -> list[list[SimilarText]]:
    """For each query the `n` of the greatest product with it, best first: the cosine of vectors of length 1."""
    best = (queries @ among.T).topk(min(n, len(among)))
    found = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [[SimilarText(place, cosine) for place, cosine in zip(*row, strict=True)] for row in found]
