"""Layout of variable-length sequences packed into a single row."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from qkv.tensors import Positions


@dataclass(frozen=True, kw_only=True)
class Varlen:
    """Sequences packed back to back in one row without padding. Each sequence attends only to itself."""

    cu_seqlens: Int[Tensor, " edge"]
    """Start of each sequence, followed by the length of the row (int32, on the model's device).

    Sequences may be empty so that every batch can have the same number of sequences.
    """
    max_seqlen: int
    """Upper bound on the length of a sequence."""

    def sequence_indices(self, n: int) -> Int[Tensor, "1 position"]:
        """Return the sequence index of each of the `n` positions in the row."""
        row_positions = torch.arange(n, device=self.cu_seqlens.device, dtype=self.cu_seqlens.dtype)
        return torch.searchsorted(self.cu_seqlens, row_positions, right=True)[None] - 1

    def position_ids(self, n: int) -> Positions:
        """Return the position of each token within its own sequence."""
        return torch.arange(n, device=self.cu_seqlens.device)[None] - self.cu_seqlens[self.sequence_indices(n)]
