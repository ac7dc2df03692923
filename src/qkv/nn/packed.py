"""How do several texts lie in one row? One after another, with nothing between."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from qkv.tensors import Positions


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A row of texts, each of which sees itself alone."""

    starts: Int[Tensor, " edge"]
    """Where each text begins, and after them where the last one ends, the row's length; int32, on the model's device.
    A text may be empty, so that a row can always have as many."""
    longest: int
    """No text has more tokens."""

    def numbers(self, n: int) -> Int[Tensor, "1 position"]:
        """Which text stands at each of the row's n places."""
        places = torch.arange(n, device=self.starts.device, dtype=self.starts.dtype)
        return torch.searchsorted(self.starts, places, right=True)[None] - 1

    def positions(self, n: int) -> Positions:
        """Where in its text each token stands."""
        return torch.arange(n, device=self.starts.device)[None] - self.starts[self.numbers(n)]
