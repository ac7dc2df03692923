"""How good a trained character model is on text kept from it: the same windows and sums for every engine."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

TRAIN_SHARE = 0.9
ROWS = 64


def split_text(path: Path) -> tuple[str, str]:
    """What is trained on, and the last tenth, cut where nanoGPT cuts it."""
    text = path.read_text(encoding="utf-8")
    cut = int(len(text) * TRAIN_SHARE)
    return text[:cut], text[cut:]


@torch.no_grad()
def heldout_loss(logits: Callable[[Tensor], Tensor], ids: Tensor, *, window: int) -> float:
    """Nats a character over the whole text, in windows that do not overlap; each begins without a past.

    The last window is shorter, so that no character but the very first goes unpredicted.
    """
    inputs, targets = ids[:-1], ids[1:]
    n_whole = len(inputs) // window * window
    groups = [
        *zip(inputs[:n_whole].view(-1, window).split(ROWS), targets[:n_whole].view(-1, window).split(ROWS), strict=True)
    ]
    if n_whole < len(inputs):
        groups.append((inputs[None, n_whole:], targets[None, n_whole:]))
    total = sum(
        float(F.cross_entropy(logits(given).flatten(0, 1), wanted.flatten(), reduction="sum"))
        for given, wanted in groups
    )
    return total / len(inputs)
