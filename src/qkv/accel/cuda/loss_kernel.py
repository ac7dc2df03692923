"""Triton kernel that computes the cross-entropy loss and the gradient of the logits.

Each row of logits is read twice (the second time partly from the L2 cache) and overwritten with its gradient. The torch
kernels, including compiled kernels, read the logits from memory once for the loss and again for the gradient.
"""
# pyright: basic, reportMissingImports=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false

import torch
import triton
from torch import Tensor
from triton import language as tl

BLOCK, WARPS = 1024, 4
"""Number of row elements per iteration, and number of warps per row. On an H200, 32 warps were 10 % slower, even though
fewer rows then share the cache."""


@triton.jit
def cross_entropy_row_inplace(
    logits,
    targets,
    losses,
    width,
    vocab_size,
    smoothing,
    COMPUTE_GRADIENT: tl.constexpr,
    USE_SMOOTHING: tl.constexpr,
    MIN_LOGIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the loss of one row and overwrite its logits with p − target distribution, or zeros if target < 0."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    target = tl.load(targets + row)
    has_target = target >= 0
    # Load the target logit before the reductions, which synchronize the threads. Another thread may overwrite the logit
    # after them.
    target_logit = tl.load(logits + tl.maximum(target, 0)).to(tl.float32)
    columns = tl.arange(0, BLOCK)
    # Keep a running maximum and sum per lane, and reduce them once at the end. Reducing every block would synchronize
    # the threads in every iteration.
    running_max, total = tl.full((BLOCK,), MIN_LOGIT, tl.float32), tl.zeros((BLOCK,), tl.float32)
    logit_sum = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab_size, 2 * BLOCK):
        # Processing two blocks per iteration keeps more loads in flight and shares one rescaling.
        offsets, next_offsets = start + columns, start + BLOCK + columns
        x = tl.load(logits + offsets, mask=offsets < vocab_size, other=MIN_LOGIT).to(tl.float32)
        y = tl.load(logits + next_offsets, mask=next_offsets < vocab_size, other=MIN_LOGIT).to(tl.float32)
        new_max = tl.maximum(running_max, tl.maximum(x, y))
        total = total * tl.exp(running_max - new_max) + (tl.exp(x - new_max) + tl.exp(y - new_max))
        running_max = new_max
        if USE_SMOOTHING:
            logit_sum += tl.where(offsets < vocab_size, x, 0.0) + tl.where(next_offsets < vocab_size, y, 0.0)
    row_max = tl.max(running_max, 0)
    log_total = row_max + tl.log(tl.sum(total * tl.exp(running_max - row_max), 0))
    loss = log_total - (1 - smoothing) * target_logit
    if USE_SMOOTHING:
        loss -= smoothing * (tl.sum(logit_sum, 0) / vocab_size)
    tl.store(losses + row, tl.where(has_target, loss, 0.0))
    if COMPUTE_GRADIENT:
        for start in range(0, width, BLOCK):
            offsets = start + columns
            x = tl.load(logits + offsets, mask=offsets < vocab_size, other=MIN_LOGIT).to(tl.float32)
            target_probability = tl.where(offsets == target, 1 - smoothing, 0.0) + smoothing / vocab_size
            gradient = tl.where(has_target & (offsets < vocab_size), tl.exp(x - log_total) - target_probability, 0.0)
            tl.store(logits + offsets, gradient.to(logits.dtype.element_ty), mask=offsets < width)


@torch.library.custom_op("qkv::cross_entropy_per_row_inplace", mutates_args={"logits"})
def cross_entropy_per_row_inplace(
    logits: Tensor, targets: Tensor, vocab_size: int, smoothing: float, *, compute_gradient: bool
) -> Tensor:
    """Return the loss of each row of logits (row, width), of which the first `vocab_size` columns are valid.

    If `compute_gradient` is True, the logits are overwritten with their gradient, and the padding columns are
    overwritten with zeros.
    """
    losses = torch.empty(len(logits), device=logits.device, dtype=torch.float32)
    cross_entropy_row_inplace[(len(logits),)](
        logits,
        targets,
        losses,
        logits.shape[1],
        vocab_size,
        smoothing,
        COMPUTE_GRADIENT=compute_gradient,
        USE_SMOOTHING=smoothing > 0,
        MIN_LOGIT=-1e30,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return losses


@cross_entropy_per_row_inplace.register_fake
def _(logits: Tensor, targets: Tensor, vocab_size: int, smoothing: float, *, compute_gradient: bool) -> Tensor:  # noqa: ARG001
    return logits.new_empty(len(logits), dtype=torch.float32)
