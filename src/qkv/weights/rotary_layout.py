"""Conversion of query and key weights between the interleaved and the half-split rotary layout.

Our models and Hugging Face rotate element i together with element i + d_head/2. Files of llama.cpp and llama2.c rotate
elements 2i and 2i + 1. Permuting the rows of the query and key projections accordingly results in the same attention
scores.
"""

from torch import Tensor


def interleaved_to_halves(weight: Tensor, *, n_heads: int) -> Tensor:
    """Permute the rows of each head from interleaved pairs to halves."""
    return weight.unflatten(0, (n_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def halves_to_interleaved(weight: Tensor, *, n_heads: int) -> Tensor:
    """Permute the rows of each head from halves to interleaved pairs."""
    return weight.unflatten(0, (n_heads, 2, -1)).transpose(1, 2).flatten(0, 2)
