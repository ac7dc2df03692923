"""Triton kernels for training, which compute biased GELU and its gradients and concatenate the QKV gradients.

Each kernel reads its inputs once. The code that torch.compile generates reads every such gradient a second time to sum
the bias gradient, and its erf takes longer than reading and writing the tensors.
"""
# pyright: basic, reportMissingImports=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false

from typing import Any

import torch
import triton
from torch import Tensor
from triton import language as tl

from qkv.accel.cuda.fused_modules import NORMAL_TAIL_COEFFICIENTS

ROWS, COLUMNS, WARPS = 16, 256, 4
"""Size of the tile that a program processes at a time, and number of warps per program."""
BACKWARD_ROWS, BACKWARD_COLUMNS = 4, 512
"""Tile size for the GELU backward kernel.

The kernel needs many registers per element, so a larger tile would reduce occupancy.
"""
ROWS_PER_PROGRAM, COPIED_ROWS_PER_PROGRAM = 256, 128
"""Number of rows that one program sums in the GELU backward kernel and in the concatenation kernel.

The partial sums are added up later in a fixed order, so the result is deterministic.
"""
C0, C1, C2, C3, C4, C5, C6, C7 = map(tl.constexpr, NORMAL_TAIL_COEFFICIENTS)


@triton.jit
def normal_tail(a):
    """Compute Φ(−a) for a ≥ 0 as 2 to the power of a polynomial."""
    power = C7 * a + C6
    power = power * a + C5
    power = power * a + C4
    power = power * a + C3
    power = power * a + C2
    power = power * a + C1
    return tl.exp2(-(power * a + C0))


@triton.jit
def gelu(x):
    a = tl.abs(x)
    return tl.maximum(x, 0.0) - a * normal_tail(a)


@triton.jit
def biased_gelu_kernel(x, bias, y, n_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute y = GELU(x + bias) for one tile."""
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < n_rows)[:, None] & (columns < width)[None, :]
    offsets = rows.to(tl.int64)[:, None] * width + columns[None, :]
    biases = tl.load(bias + columns, mask=columns < width, other=0.0).to(tl.float32)
    values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32) + biases[None, :]
    tl.store(y + offsets, gelu(values).to(y.dtype.element_ty), mask=inside)


@triton.jit
def biased_gelu_backward_kernel(
    grad_output, x, bias, grad_x, partial_sums, n_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Compute grad_x = grad_output · GELU'(x + bias), and its column sums over the rows of this program."""
    block = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < width
    biases = tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, ROWS_PER_PROGRAM, ROWS):
        rows = block * ROWS_PER_PROGRAM + start + tl.arange(0, ROWS)
        inside = (rows < n_rows)[:, None] & is_column[None, :]
        offsets = rows.to(tl.int64)[:, None] * width + columns[None, :]
        values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32) + biases[None, :]
        upstream = tl.load(grad_output + offsets, mask=inside, other=0.0).to(tl.float32)
        tail = normal_tail(tl.abs(values))
        # GELU'(x) = Φ(x) + x·φ(x). The constant 0.7213… is log₂(e)/2, and 0.3989… is 1/√(2π).
        slope = tl.where(values > 0, 1 - tail, tail) + values * 0.3989422804 * tl.exp2(-0.7213475204 * values * values)
        grad = upstream * slope
        tl.store(grad_x + offsets, grad.to(grad_x.dtype.element_ty), mask=inside)
        total += grad
    tl.store(partial_sums + block.to(tl.int64) * width + columns, tl.sum(total, 0), mask=is_column)


@triton.jit
def copy_and_sum_columns(
    source, destination, partial_sums, n_rows, n_columns, source_stride, destination_width, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Copy a matrix into columns of a wider matrix and compute its column sums over the rows of this program."""
    block = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < n_columns
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, ROWS_PER_PROGRAM, ROWS):
        rows = block * ROWS_PER_PROGRAM + start + tl.arange(0, ROWS)
        inside = (rows < n_rows)[:, None] & is_column[None, :]
        values = tl.load(source + rows[:, None] * source_stride + columns[None, :], mask=inside, other=0.0)
        tl.store(destination + rows[:, None] * destination_width + columns[None, :], values, mask=inside)
        total += values.to(tl.float32)
    tl.store(partial_sums + block * destination_width + columns, tl.sum(total, 0), mask=is_column)


@triton.jit
def concat_and_sum_columns_kernel(
    first, second, third, joined, partial_sums, n_rows, n_first, n_second, n_third, first_stride, second_stride,
    third_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROWS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Concatenate three matrices with different row strides along their columns."""
    part, width = tl.program_id(2), n_first + n_second + n_third
    if part == 0:
        copy_and_sum_columns(
            first, joined, partial_sums, n_rows, n_first, first_stride, width, ROWS, COLUMNS, ROWS_PER_PROGRAM
        )
    elif part == 1:
        copy_and_sum_columns(
            second, joined + n_first, partial_sums + n_first, n_rows, n_second, second_stride, width, ROWS, COLUMNS,
            ROWS_PER_PROGRAM,
        )  # fmt: skip
    else:
        copy_and_sum_columns(
            third, joined + n_first + n_second, partial_sums + n_first + n_second, n_rows, n_third, third_stride, width,
            ROWS, COLUMNS, ROWS_PER_PROGRAM,
        )  # fmt: skip


@torch.library.custom_op("qkv::biased_gelu_forward", mutates_args=())
def biased_gelu_forward(x: Tensor, bias: Tensor) -> Tensor:
    """Compute GELU(x + bias) as a contiguous tensor."""
    x, width = x.contiguous(), x.shape[-1]
    y, n_rows = torch.empty_like(x), x.numel() // width
    biased_gelu_kernel[(triton.cdiv(n_rows, ROWS), triton.cdiv(width, COLUMNS))](
        x, bias, y, n_rows, width, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS
    )
    return y


@biased_gelu_forward.register_fake
def _fake_biased_gelu_forward(x: Tensor, bias: Tensor) -> Tensor:  # noqa: ARG001
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("qkv::biased_gelu_backward_partial_sums", mutates_args=())
def biased_gelu_backward_partial_sums(grad_output: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradient of x, and one row of partial sums of the bias gradient per program."""
    grad_output, x, width = grad_output.contiguous(), x.contiguous(), x.shape[-1]
    grad_x, n_rows = torch.empty_like(x), x.numel() // width
    n_programs = triton.cdiv(n_rows, ROWS_PER_PROGRAM)
    partial_sums = torch.empty(n_programs, width, device=x.device, dtype=torch.float32)
    biased_gelu_backward_kernel[(n_programs, triton.cdiv(width, BACKWARD_COLUMNS))](
        grad_output, x, bias, grad_x, partial_sums, n_rows, width, ROWS=BACKWARD_ROWS, COLUMNS=BACKWARD_COLUMNS,
        ROWS_PER_PROGRAM=ROWS_PER_PROGRAM, num_warps=WARPS,
    )  # fmt: skip
    return grad_x, partial_sums


@biased_gelu_backward_partial_sums.register_fake
def _fake_biased_gelu_backward_partial_sums(grad_output: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    n_programs = -(-(x.numel() // x.shape[-1]) // ROWS_PER_PROGRAM)
    partial_sums = x.new_empty((n_programs, x.shape[-1]), dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.contiguous_format), partial_sums


def _save_inputs(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ANN401, ARG001
    ctx.save_for_backward(*inputs)


def _biased_gelu_autograd(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    x, bias = ctx.saved_tensors
    grad_x, partial_sums = biased_gelu_backward_partial_sums(grad_output, x, bias)
    return grad_x, partial_sums.sum(0).to(bias.dtype)


biased_gelu_forward.register_autograd(_biased_gelu_autograd, setup_context=_save_inputs)


@torch.library.custom_op("qkv::concat_with_partial_column_sums", mutates_args=())
def concat_with_partial_column_sums(first: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor, Tensor]:
    """Concatenate three matrices along their columns, and compute one row of partial column sums per program."""
    parts = [part if part.stride(1) == 1 else part.contiguous() for part in (first, second, third)]
    n_rows, widths = len(first), [part.shape[1] for part in parts]
    joined = first.new_empty(n_rows, sum(widths))
    n_programs = triton.cdiv(n_rows, COPIED_ROWS_PER_PROGRAM)
    partial_sums = torch.empty(n_programs, sum(widths), device=first.device, dtype=torch.float32)
    concat_and_sum_columns_kernel[(n_programs, triton.cdiv(max(widths), COLUMNS), 3)](
        *parts, joined, partial_sums, n_rows, *widths, *(part.stride(0) for part in parts), ROWS=ROWS, COLUMNS=COLUMNS,
        ROWS_PER_PROGRAM=COPIED_ROWS_PER_PROGRAM, num_warps=WARPS,
    )  # fmt: skip
    return joined, partial_sums


@concat_with_partial_column_sums.register_fake
def _fake_concat_with_partial_column_sums(first: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor, Tensor]:
    width = first.shape[1] + second.shape[1] + third.shape[1]
    n_programs = -(-len(first) // COPIED_ROWS_PER_PROGRAM)
    return first.new_empty(len(first), width), first.new_empty((n_programs, width), dtype=torch.float32)
