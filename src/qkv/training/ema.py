"""Exponential moving average (EMA) of the model weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class EMA:
    """An exponential moving average of the model weights: average ← decay·average + (1 − decay)·weights.

    The average is updated after every optimizer step. At step t, the decay is at most (1 + t)/(10 + t), which quickly
    removes the influence of the random initial weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._parameters = dict(model.named_parameters())
        self.weights: dict[str, Tensor] = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the current model weights after optimizer step `step`."""
        decay = min(self.decay, (1 + step) / (10 + step))
        # A foreach operation updates all tensors in a few kernels. On a GPU, the launches would dominate if each tensor
        # were updated separately.
        current: list[Tensor] = [parameter.detach() for parameter in self._parameters.values()]
        torch._foreach_lerp_(list(self.weights.values()), current, 1 - decay)

    @contextmanager
    def apply_to_model(self) -> Iterator[None]:
        """Replace the model weights with the averaged weights while the context is active."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Swap the model weights and the averaged weights in place."""
        for name, average in self.weights.items():
            parameter = self._parameters[name]
            raw_weight = parameter.clone()
            parameter.copy_(average)
            average.copy_(raw_weight)
