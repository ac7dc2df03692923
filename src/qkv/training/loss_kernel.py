"""How does a GPU turn logits into losses and errors in one pass over memory? In Triton.

A row of the vocabulary's logits is read twice, the second time from the GPU's cache, and its errors are written in the
logits' place. torch's own kernels, the compiled ones too, read it from memory for the loss and again for the gradient.
"""
# pyright: basic, reportMissingImports=false, reportPossiblyUnboundVariable=false

import torch
import triton
from torch import Tensor
from triton import language as tl

BLOCK = 4096


@triton.jit
def _row(logits, targets, losses, width, n_words, smoothing, WANTS_ERRORS: tl.constexpr, BLOCK: tl.constexpr):
    """One row's −log p(target), and p − aim in the logits' place; zeros where nothing is predicted (target < 0)."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    target = tl.load(targets + row)
    is_wanted = target >= 0
    # Before the first sum over the row, which all threads wait for: afterwards others may write there.
    at_target = tl.load(logits + tl.maximum(target, 0)).to(tl.float32)
    columns = tl.arange(0, BLOCK)
    most = -float("inf")
    total = 0.0
    added = 0.0
    for start in range(0, n_words, BLOCK):
        inside = start + columns < n_words
        x = tl.load(logits + start + columns, mask=inside, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(most, tl.max(x, 0))
        total = total * tl.exp(most - higher) + tl.sum(tl.exp(x - higher), 0)
        added += tl.sum(tl.where(inside, x, 0.0), 0)
        most = higher
    log_total = most + tl.log(total)
    loss = log_total - (1 - smoothing) * at_target - smoothing * (added / n_words)
    tl.store(losses + row, tl.where(is_wanted, loss, 0.0))
    if WANTS_ERRORS:
        for start in range(0, width, BLOCK):
            place = start + columns
            x = tl.load(logits + place, mask=place < n_words, other=-float("inf")).to(tl.float32)
            aim = tl.where(place == target, 1 - smoothing, 0.0) + smoothing / n_words
            error = tl.where(is_wanted & (place < n_words), tl.exp(x - log_total) - aim, 0.0)
            tl.store(logits + place, error.to(logits.dtype.element_ty), mask=place < width)


@torch.library.custom_op("qkv::errors_", mutates_args={"logits"})
def errors_(logits: Tensor, targets: Tensor, n_words: int, smoothing: float, wants_errors: bool) -> Tensor:
    """Each row's loss; with `wants_errors` the logits (row, width ≥ n_words) become p − aim, zeros past n_words."""
    losses = torch.empty(len(logits), device=logits.device, dtype=torch.float32)
    _row[(len(logits),)](
        logits, targets, losses, logits.shape[1], n_words, smoothing, WANTS_ERRORS=wants_errors, BLOCK=BLOCK,
        num_warps=16,
    )  # fmt: skip
    return losses


@errors_.register_fake
def _(logits: Tensor, targets: Tensor, n_words: int, smoothing: float, wants_errors: bool) -> Tensor:  # noqa: ARG001
    return logits.new_empty(len(logits), dtype=torch.float32)
