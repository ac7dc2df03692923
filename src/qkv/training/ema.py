"""Exponential moving average (EMA) of the model weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class EMA:
    """Updates average ← decay·average + (1 − decay)·weights after every optimizer step.

    At step t, the decay is at most (1 + t)/(10 + t), which quickly removes the influence of the random initial weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._parameters = dict(model.named_parameters())
        self.weights: dict[str, Tensor] = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the current model weights after optimizer step `step`."""
        decay = min(self.decay, (1 + step) / (10 + step))
        # A foreach operation updates all tensors in a few kernels. One launch per tensor would dominate on a GPU.
        current: list[Tensor] = [parameter.detach() for parameter in self._parameters.values()]
        torch._foreach_lerp_(list(self.weights.values()), current, 1 - decay)

    @contextmanager
    def apply_to_model(self) -> Iterator[None]:
        """Context manager in which the model holds the averaged weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchange the model weights and the averaged weights in place."""
        for name, average in self.weights.items():
            parameter = self._parameters[name]
            raw_weight = parameter.clone()
            parameter.copy_(average)
            average.copy_(raw_weight)
