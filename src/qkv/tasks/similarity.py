"""Find nearest neighbors by cosine similarity."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SimilarText:
    index: int
    """The index of the text in the list of candidates."""
    cosine: float


def find_nearest_by_dot_product(
    queries: Float[Tensor, "query d_model"], candidates: Float[Tensor, "text d_model"], *, n: int
) -> list[list[SimilarText]]:
    """Return the `n` candidates with the largest dot products for each query, best first.

    For normalized vectors, the dot product is the cosine similarity.
    """
    top = (queries @ candidates.T).topk(min(n, len(candidates)))
    rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [[SimilarText(index, cosine) for index, cosine in zip(*row, strict=True)] for row in rows]
