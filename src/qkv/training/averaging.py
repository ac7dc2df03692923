"""A running average of the weights: smoother than the last step's, and usually better."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Averaged:
    """average ← decay·average + (1 − decay)·weights, after every update.

    Early on the decay is smaller, (1 + t)/(10 + t), so that the random start is soon forgotten.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._parameters = dict(model.named_parameters())
        self.weights: dict[str, Tensor] = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        # One call for all of them: on a GPU a launch each would cost more than the work.
        now: list[Tensor] = [parameter.detach() for parameter in self._parameters.values()]
        torch._foreach_lerp_(list(self.weights.values()), now, 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside the `with`, the model has the averaged weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, average in self.weights.items():
            parameter = self._parameters[name]
            kept = parameter.clone()
            parameter.copy_(average)
            average.copy_(kept)
