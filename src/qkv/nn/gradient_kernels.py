"""Which gradients come of one pass over memory? An activation's with its bias's, three projections' with their biases'.

In Triton, for what is compiled for training on a GPU. torch's compiler reads every such gradient again to add up a
bias's, and its erf takes longer than the memory does.
"""
# pyright: basic, reportMissingImports=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false

from typing import Any

import torch
import triton
from torch import Tensor
from triton import language as tl

from qkv.nn.feedforward import TAIL

ROWS, COLUMNS, WARPS = 16, 256, 4
"""Of what a program holds at once."""
GRADIENT_ROWS, GRADIENT_COLUMNS = 4, 512
"""The same of an activation's gradient: its many numbers an element would leave few programs room in the registers."""
ROWS_A_PROGRAM, COPIED_A_PROGRAM = 256, 128
"""Added up by one program, of an activation's gradient and of what is put side by side; what several have is added up
afterwards, always in one order."""
T0, T1, T2, T3, T4, T5, T6, T7 = map(tl.constexpr, TAIL)


@triton.jit
def tail(a):
    """Φ(−a) of a ≥ 0: two to the power of a polynomial."""
    power = T7 * a + T6
    power = power * a + T5
    power = power * a + T4
    power = power * a + T3
    power = power * a + T2
    power = power * a + T1
    return tl.exp2(-(power * a + T0))


@triton.jit
def gelu(x):
    a = tl.abs(x)
    return tl.maximum(x, 0.0) - a * tail(a)


@triton.jit
def gelu_tile(x, bias, y, n_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """y = GELU(x + bias)."""
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < n_rows)[:, None] & (columns < width)[None, :]
    place = rows.to(tl.int64)[:, None] * width + columns[None, :]
    added = tl.load(bias + columns, mask=columns < width, other=0.0).to(tl.float32)
    at = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) + added[None, :]
    tl.store(y + place, gelu(at).to(y.dtype.element_ty), mask=inside)


@triton.jit
def gelu_gradient_tile(
    given, x, bias, gradient, sums, n_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS_A_PROGRAM: tl.constexpr,
):  # fmt: skip
    """gradient = given · GELU'(x + bias), and its sums over some rows."""
    block = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < width
    added = tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, ROWS_A_PROGRAM, ROWS):
        rows = block * ROWS_A_PROGRAM + start + tl.arange(0, ROWS)
        inside = (rows < n_rows)[:, None] & is_column[None, :]
        place = rows.to(tl.int64)[:, None] * width + columns[None, :]
        at = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) + added[None, :]
        upstream = tl.load(given + place, mask=inside, other=0.0).to(tl.float32)
        low = tail(tl.abs(at))
        # Φ(x) + x·φ(x); 0.72… is log₂(e)/2, 0.39… is 1/√(2π).
        slope = tl.where(at > 0, 1 - low, low) + at * 0.3989422804 * tl.exp2(-0.7213475204 * at * at)
        made = upstream * slope
        tl.store(gradient + place, made.to(gradient.dtype.element_ty), mask=inside)
        total += made
    tl.store(sums + block.to(tl.int64) * width + columns, tl.sum(total, 0), mask=is_column)


@triton.jit
def copy_part(
    source, joined, sums, n_rows, own, step, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS_A_PROGRAM: tl.constexpr,
):  # fmt: skip
    """A matrix into columns of a wider one, and its sums over some rows."""
    block = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < own
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, ROWS_A_PROGRAM, ROWS):
        rows = block * ROWS_A_PROGRAM + start + tl.arange(0, ROWS)
        inside = (rows < n_rows)[:, None] & is_column[None, :]
        read = tl.load(source + rows[:, None] * step + columns[None, :], mask=inside, other=0.0)
        tl.store(joined + rows[:, None] * width + columns[None, :], read, mask=inside)
        total += read.to(tl.float32)
    tl.store(sums + block * width + columns, tl.sum(total, 0), mask=is_column)


@triton.jit
def beside_tile(
    first, second, third, joined, sums, n_rows, n_first, n_second, n_third, first_step, second_step, third_step,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROWS_A_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Three matrices side by side, each with its own step from row to row."""
    part, width = tl.program_id(2), n_first + n_second + n_third
    if part == 0:
        copy_part(first, joined, sums, n_rows, n_first, first_step, width, ROWS, COLUMNS, ROWS_A_PROGRAM)
    elif part == 1:
        copy_part(
            second, joined + n_first, sums + n_first, n_rows, n_second, second_step, width, ROWS, COLUMNS,
            ROWS_A_PROGRAM,
        )  # fmt: skip
    else:
        copy_part(
            third, joined + n_first + n_second, sums + n_first + n_second, n_rows, n_third, third_step, width, ROWS,
            COLUMNS, ROWS_A_PROGRAM,
        )  # fmt: skip


@torch.library.custom_op("qkv::biased_gelu", mutates_args=())
def biased_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """GELU(x + bias) of rows that lie one behind another."""
    x, width = x.contiguous(), x.shape[-1]
    y, n_rows = torch.empty_like(x), x.numel() // width
    gelu_tile[(triton.cdiv(n_rows, ROWS), triton.cdiv(width, COLUMNS))](
        x, bias, y, n_rows, width, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS
    )
    return y


@biased_gelu.register_fake
def _(x: Tensor, bias: Tensor) -> Tensor:  # noqa: ARG001
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("qkv::biased_gelu_gradients", mutates_args=())
def biased_gelu_gradients(given: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Towards x, and towards the bias in as many rows as there were programs."""
    given, x, width = given.contiguous(), x.contiguous(), x.shape[-1]
    gradient, n_rows = torch.empty_like(x), x.numel() // width
    sums = torch.empty(triton.cdiv(n_rows, ROWS_A_PROGRAM), width, device=x.device, dtype=torch.float32)
    gelu_gradient_tile[(len(sums), triton.cdiv(width, GRADIENT_COLUMNS))](
        given, x, bias, gradient, sums, n_rows, width, ROWS=GRADIENT_ROWS, COLUMNS=GRADIENT_COLUMNS,
        ROWS_A_PROGRAM=ROWS_A_PROGRAM, num_warps=WARPS,
    )  # fmt: skip
    return gradient, sums


@biased_gelu_gradients.register_fake
def _(given: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    n_blocks = -(-(x.numel() // x.shape[-1]) // ROWS_A_PROGRAM)
    sums = x.new_empty((n_blocks, x.shape[-1]), dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.contiguous_format), sums


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ANN401, ARG001
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, given: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    x, bias = ctx.saved_tensors
    gradient, sums = biased_gelu_gradients(given, x, bias)
    return gradient, sums.sum(0).to(bias.dtype)


biased_gelu.register_autograd(_gradients, setup_context=_remember)


@torch.library.custom_op("qkv::beside", mutates_args=())
def beside(first: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor, Tensor]:
    """Three (row, column) matrices side by side, and what is to be added up of their columns' sums."""
    parts = [part if part.stride(1) == 1 else part.contiguous() for part in (first, second, third)]
    n_rows, widths = len(first), [part.shape[1] for part in parts]
    joined = first.new_empty(n_rows, sum(widths))
    sums = torch.empty(triton.cdiv(n_rows, COPIED_A_PROGRAM), sum(widths), device=first.device, dtype=torch.float32)
    beside_tile[(len(sums), triton.cdiv(max(widths), COLUMNS), 3)](
        *parts, joined, sums, n_rows, *widths, *(part.stride(0) for part in parts), ROWS=ROWS, COLUMNS=COLUMNS,
        ROWS_A_PROGRAM=COPIED_A_PROGRAM, num_warps=WARPS,
    )  # fmt: skip
    return joined, sums


@beside.register_fake
def _(first: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor, Tensor]:
    width = first.shape[1] + second.shape[1] + third.shape[1]
    n_blocks = -(-len(first) // COPIED_A_PROGRAM)
    return first.new_empty(len(first), width), first.new_empty((n_blocks, width), dtype=torch.float32)
