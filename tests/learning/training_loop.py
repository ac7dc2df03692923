"""A minimal training loop for tests."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

SEEDS = [pytest.param(seed, marks=[pytest.mark.long] if seed else []) for seed in range(5)]
"""One seed in the default tests and four more in the long ones, because learning depends on the random seed."""

HELD_OUT = 1_000_003
"""Seed of the held-out data, which no step of `train_on_samples` uses."""


def train_on_samples(
    model: nn.Module,
    compute_loss: Callable[[torch.Generator], Tensor],
    *,
    n_steps: int,
    learning_rate: float,
    seed: int,
) -> None:
    """Train with AdamW, warm-up over 10 % of the steps and linear decay to 0. Step t uses a generator for (seed, t)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    model.train()
    for step in range(n_steps):
        warmup, decay = (step + 1) / (0.1 * n_steps), (n_steps - step) / (0.9 * n_steps)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(warmup, decay, 1.0)
        optimizer.zero_grad()
        compute_loss(torch.Generator().manual_seed(seed * n_steps + step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
