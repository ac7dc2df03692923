"""Compute the held-out loss of character models in the same way for every engine."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

TRAIN_FRACTION = 0.9
ROWS = 64


def split_to_context_length(path: Path) -> tuple[str, str]:
    """Split a text into training text and the held-out last tenth. The split is at the same character as in nanoGPT."""
    text = path.read_text(encoding="utf-8")
    cut = int(len(text) * TRAIN_FRACTION)
    return text[:cut], text[cut:]


@torch.no_grad()
def held_out_loss(logits: Callable[[Tensor], Tensor], ids: Tensor, *, window: int) -> float:
    """Compute the loss in nats per character over non-overlapping windows.

    The last window is shorter so that every character except the first is predicted.
    """
    inputs, targets = ids[:-1], ids[1:]
    n_whole = len(inputs) // window * window
    groups = [
        *zip(inputs[:n_whole].view(-1, window).split(ROWS), targets[:n_whole].view(-1, window).split(ROWS), strict=True)
    ]
    if n_whole < len(inputs):
        groups.append((inputs[None, n_whole:], targets[None, n_whole:]))
    total = sum(
        float(F.cross_entropy(logits(inputs).flatten(0, 1), wanted.flatten(), reduction="sum"))
        for inputs, wanted in groups
    )
    return total / len(inputs)
