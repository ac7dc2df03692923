"""How a small model is made to learn in the tests: one plain loop."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

SEEDS = [pytest.param(seed, marks=[pytest.mark.long] if seed else []) for seed in range(5)]
"""Learning depends on luck: one seed in every run of the tests, four more in the long one."""

HELD_OUT = 1_000_003
"""Seed of what a model is tested on; no step of `train_on_samples` draws from it."""


def train_on_samples(
    model: nn.Module,
    loss: Callable[[torch.Generator], Tensor],
    *,
    n_steps: int,
    learning_rate: float,
    seed: int,
) -> None:
    """AdamW; the rate rises over the first tenth and falls to 0. Step t draws from (seed, t) alone."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    model.train()
    for step in range(n_steps):
        rise, fall = (step + 1) / (0.1 * n_steps), (n_steps - step) / (0.9 * n_steps)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(rise, fall, 1.0)
        optimizer.zero_grad()
        loss(torch.Generator().manual_seed(seed * n_steps + step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
