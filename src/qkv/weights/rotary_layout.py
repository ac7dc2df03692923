"""Convert query and key weights between the interleaved and half-split rotary layouts.

Our models and Hugging Face's rotate element i together with element i + d_head/2. llama.cpp and llama2.c rotate element
2i together with element 2i + 1. Permuting the rows of the query and key projections converts one layout to the other
without changing the attention scores.
"""

from torch import Tensor


def interleaved_to_halves(weight: Tensor, *, n_heads: int) -> Tensor:
    """Permute the rows of each head from the interleaved to the half-split rotary layout."""
    return weight.unflatten(0, (n_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def halves_to_interleaved(weight: Tensor, *, n_heads: int) -> Tensor:
    """Permute the rows of each head from the half-split to the interleaved rotary layout."""
    return weight.unflatten(0, (n_heads, 2, -1)).transpose(1, 2).flatten(0, 2)
