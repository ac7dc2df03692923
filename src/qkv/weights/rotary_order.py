"""In which order do rotary positions take the numbers of a query: neighbours, or one from each half?

Ours (and Hugging Face's) turn number i together with number i + d_head/2. llama.cpp's and llama2.c's files turn
2i with 2i + 1. The rows of the query and key matrices put in the other order give the same scores.
"""

from torch import Tensor


def pairs_to_halves(weight: Tensor, *, n_heads: int) -> Tensor:
    """Rows from neighbours to halves, head by head."""
    return weight.unflatten(0, (n_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def halves_to_pairs(weight: Tensor, *, n_heads: int) -> Tensor:
    return weight.unflatten(0, (n_heads, 2, -1)).transpose(1, 2).flatten(0, 2)
