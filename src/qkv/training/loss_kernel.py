"""How does a GPU turn logits into losses and errors in one pass over memory? In Triton.

A row of the vocabulary's logits is read twice, in part from the GPU's cache the second time, and its errors are written
in the logits' place. torch's own kernels, the compiled ones too, read it from memory for the loss and again for the
gradient.
"""
# pyright: basic, reportMissingImports=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false

import torch
import triton
from torch import Tensor
from triton import language as tl

BLOCK, WARPS = 1024, 4
"""Numbers of a row at once, and the warps for them. On an H200 32 warps, which keep fewer rows at work and so in its
cache, were a tenth slower."""


@triton.jit
def loss_row(
    logits, targets, losses, width, n_words, smoothing, WANTS_ERRORS: tl.constexpr, IS_SMOOTH: tl.constexpr,
    LEAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row's −log p(target), and p − aim in the logits' place; zeros where nothing is predicted (target < 0)."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    target = tl.load(targets + row)
    is_wanted = target >= 0
    # Before the sums over the row, which all threads wait for: afterwards others may write there.
    at_target = tl.load(logits + tl.maximum(target, 0)).to(tl.float32)
    columns = tl.arange(0, BLOCK)
    # A greatest and a sum for each lane, brought together once: a sum over the row a block would be waited for.
    most, total = tl.full((BLOCK,), LEAST, tl.float32), tl.zeros((BLOCK,), tl.float32)
    added = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n_words, 2 * BLOCK):
        # Two blocks at once: more of the row is on its way, and there is one rescaling for both.
        place, next_place = start + columns, start + BLOCK + columns
        x = tl.load(logits + place, mask=place < n_words, other=LEAST).to(tl.float32)
        y = tl.load(logits + next_place, mask=next_place < n_words, other=LEAST).to(tl.float32)
        higher = tl.maximum(most, tl.maximum(x, y))
        total = total * tl.exp(most - higher) + (tl.exp(x - higher) + tl.exp(y - higher))
        most = higher
        if IS_SMOOTH:
            added += tl.where(place < n_words, x, 0.0) + tl.where(next_place < n_words, y, 0.0)
    highest = tl.max(most, 0)
    log_total = highest + tl.log(tl.sum(total * tl.exp(most - highest), 0))
    loss = log_total - (1 - smoothing) * at_target
    if IS_SMOOTH:
        loss -= smoothing * (tl.sum(added, 0) / n_words)
    tl.store(losses + row, tl.where(is_wanted, loss, 0.0))
    if WANTS_ERRORS:
        for start in range(0, width, BLOCK):
            place = start + columns
            x = tl.load(logits + place, mask=place < n_words, other=LEAST).to(tl.float32)
            aim = tl.where(place == target, 1 - smoothing, 0.0) + smoothing / n_words
            error = tl.where(is_wanted & (place < n_words), tl.exp(x - log_total) - aim, 0.0)
            tl.store(logits + place, error.to(logits.dtype.element_ty), mask=place < width)


@torch.library.custom_op("qkv::errors_", mutates_args={"logits"})
def errors_(logits: Tensor, targets: Tensor, n_words: int, smoothing: float, *, wants_errors: bool) -> Tensor:
    """Each row's loss; with `wants_errors` the logits (row, width ≥ n_words) become p − aim, zeros past n_words."""
    losses = torch.empty(len(logits), device=logits.device, dtype=torch.float32)
    loss_row[(len(logits),)](
        logits, targets, losses, logits.shape[1], n_words, smoothing, WANTS_ERRORS=wants_errors,
        IS_SMOOTH=smoothing > 0, LEAST=-1e30, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return losses


@errors_.register_fake
def _(logits: Tensor, targets: Tensor, n_words: int, smoothing: float, *, wants_errors: bool) -> Tensor:  # noqa: ARG001
    return logits.new_empty(len(logits), dtype=torch.float32)
