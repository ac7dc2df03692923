"""Triton kernel for the backward pass of a norm, fused with the gradient of the residual stream.

The code that torch.compile generates adds up the partial gradients of γ and β in two additional kernels per norm and
takes about a third longer than the memory traffic requires.
"""
# pyright: basic, reportMissingImports=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false

import torch
import triton
from torch import Tensor
from triton import language as tl

ROWS = 2
"""Number of rows that a program processes at a time."""
VALUES_PER_WARP = 256
"""Number of values per row and warp. With this number, each thread loads 16 bytes."""
ROWS_PER_PROGRAM = 64
"""Number of rows whose parameter gradients one program sums.

The partial sums are added later in a fixed order, so the result is deterministic.
"""


@triton.jit
def norm_residual_backward_kernel(
    grad_normed, grad_residual, x, weight, mean, scale, grad_x, partial_sums, n_rows, width,
    IS_CENTERED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ROWS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Compute grad_x = grad_residual + the gradient through the norm, and partial sums of the gradients of γ and β."""
    block, columns = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    is_column = columns < width
    gamma = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    grad_gamma, grad_beta = tl.zeros((ROWS, WIDTH), tl.float32), tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, ROWS_PER_PROGRAM, ROWS):
        rows = block * ROWS_PER_PROGRAM + start + tl.arange(0, ROWS)
        inside = (rows < n_rows)[:, None] & is_column[None, :]
        offsets = rows[:, None] * width + columns[None, :]
        grad = tl.load(grad_normed + offsets, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
        residual = tl.load(grad_residual + offsets, mask=inside, other=0.0).to(tl.float32)
        row_scale = tl.load(scale + rows, mask=rows < n_rows, other=0.0)[:, None]
        if IS_CENTERED:
            values -= tl.load(mean + rows, mask=rows < n_rows, other=0.0)[:, None]
        normed = tl.where(inside, values * row_scale, 0.0)
        scaled_grad = grad * gamma
        # The norm removes the gradient components along the normed vector and, for LayerNorm, along the mean direction.
        removed = normed * (tl.sum(scaled_grad * normed, 1) / width)[:, None]
        if IS_CENTERED:
            removed += (tl.sum(scaled_grad, 1) / width)[:, None]
            grad_beta += grad
        grad_gamma += grad * normed
        result = residual + (scaled_grad - removed) * row_scale
        tl.store(grad_x + offsets, result.to(grad_x.dtype.element_ty), mask=inside)
    if IS_CENTERED:
        tl.store(partial_sums + (2 * block + 1) * width + columns, tl.sum(grad_beta, 0), mask=is_column)
        tl.store(partial_sums + 2 * block * width + columns, tl.sum(grad_gamma, 0), mask=is_column)
    else:
        tl.store(partial_sums + block * width + columns, tl.sum(grad_gamma, 0), mask=is_column)


@torch.library.custom_op("qkv::norm_residual_backward_partial_sums", mutates_args=())
def norm_residual_backward_partial_sums(
    grad_normed: Tensor, grad_residual: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradient of x, and one row of partial sums per program for γ (and for β if `mean` is passed)."""
    grad_normed, grad_residual, x = grad_normed.contiguous(), grad_residual.contiguous(), x.contiguous()
    width = x.shape[-1]
    grad_x, n_rows = torch.empty_like(x), x.numel() // width
    n_sums = 1 if mean is None else 2
    n_programs = triton.cdiv(n_rows, ROWS_PER_PROGRAM)
    partial_sums = torch.empty(n_programs, n_sums, width, device=x.device, dtype=torch.float32)
    padded_width = triton.next_power_of_2(width)
    norm_residual_backward_kernel[(n_programs,)](
        grad_normed, grad_residual, x, weight, scale if mean is None else mean, scale, grad_x, partial_sums, n_rows,
        width, IS_CENTERED=mean is not None, ROWS=ROWS, WIDTH=padded_width, ROWS_PER_PROGRAM=ROWS_PER_PROGRAM,
        num_warps=min(max(padded_width // VALUES_PER_WARP, 1), 16),
    )  # fmt: skip
    return grad_x, partial_sums


@norm_residual_backward_partial_sums.register_fake
def _fake_norm_residual_backward_partial_sums(
    grad_normed: Tensor,  # noqa: ARG001
    grad_residual: Tensor,  # noqa: ARG001
    x: Tensor,
    weight: Tensor,  # noqa: ARG001
    mean: Tensor | None,
    scale: Tensor,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    n_programs, n_sums = -(-(x.numel() // x.shape[-1]) // ROWS_PER_PROGRAM), 1 if mean is None else 2
    partial_sums = x.new_empty((n_programs, n_sums, x.shape[-1]), dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.contiguous_format), partial_sums
