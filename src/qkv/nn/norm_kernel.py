"""How does one pass make all gradients of a norm? In Triton, the residual stream's own gradient added on the way.

torch's compiler reads every row for the gradients of γ and β as well, but adds up what programs have found in two
further kernels a norm, and takes a third longer than the memory does.
"""
# pyright: basic, reportMissingImports=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false

import torch
import triton
from torch import Tensor
from triton import language as tl

ROWS = 2
"""That a program holds at once."""
NUMBERS_A_WARP = 256
"""Of a row: 16 bytes a thread."""
ROWS_A_PROGRAM = 64
"""Added up by one program; what several have is added up afterwards, always in one order."""


@triton.jit
def norm_gradient_rows(
    given, kept, x, weight, mean, scale, gradient, sums, n_rows, width, IS_CENTRED: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, ROWS_A_PROGRAM: tl.constexpr,
):  # fmt: skip
    """gradient = kept + given through (x − mean) · scale · γ; given's sums over some rows, towards γ and β."""
    block, columns = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    is_column = columns < width
    gamma = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    of_gamma, of_beta = tl.zeros((ROWS, WIDTH), tl.float32), tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, ROWS_A_PROGRAM, ROWS):
        rows = block * ROWS_A_PROGRAM + start + tl.arange(0, ROWS)
        inside = (rows < n_rows)[:, None] & is_column[None, :]
        place = rows[:, None] * width + columns[None, :]
        upstream = tl.load(given + place, mask=inside, other=0.0).to(tl.float32)
        at = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        own = tl.load(kept + place, mask=inside, other=0.0).to(tl.float32)
        size = tl.load(scale + rows, mask=rows < n_rows, other=0.0)[:, None]
        if IS_CENTRED:
            at -= tl.load(mean + rows, mask=rows < n_rows, other=0.0)[:, None]
        normed = tl.where(inside, at * size, 0.0)
        moved = upstream * gamma
        away = normed * (tl.sum(moved * normed, 1) / width)[:, None]
        if IS_CENTRED:
            away += (tl.sum(moved, 1) / width)[:, None]
            of_beta += upstream
        of_gamma += upstream * normed
        tl.store(gradient + place, (own + (moved - away) * size).to(gradient.dtype.element_ty), mask=inside)
    if IS_CENTRED:
        tl.store(sums + (2 * block + 1) * width + columns, tl.sum(of_beta, 0), mask=is_column)
        tl.store(sums + 2 * block * width + columns, tl.sum(of_gamma, 0), mask=is_column)
    else:
        tl.store(sums + block * width + columns, tl.sum(of_gamma, 0), mask=is_column)


@torch.library.custom_op("qkv::norm_gradients", mutates_args=())
def norm_gradients(
    given: Tensor, kept: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Towards x, and towards γ (and β, where there is a mean) in as many rows as there were programs."""
    given, kept, x, width = given.contiguous(), kept.contiguous(), x.contiguous(), x.shape[-1]
    gradient, n_rows = torch.empty_like(x), x.numel() // width
    n_sums = 1 if mean is None else 2
    sums = torch.empty(triton.cdiv(n_rows, ROWS_A_PROGRAM), n_sums, width, device=x.device, dtype=torch.float32)
    wide = triton.next_power_of_2(width)
    norm_gradient_rows[(len(sums),)](
        given, kept, x, weight, scale if mean is None else mean, scale, gradient, sums, n_rows, width,
        IS_CENTRED=mean is not None, ROWS=ROWS, WIDTH=wide, ROWS_A_PROGRAM=ROWS_A_PROGRAM,
        num_warps=min(max(wide // NUMBERS_A_WARP, 1), 16),
    )  # fmt: skip
    return gradient, sums


@norm_gradients.register_fake
def _(
    given: Tensor,  # noqa: ARG001
    kept: Tensor,  # noqa: ARG001
    x: Tensor,
    weight: Tensor,  # noqa: ARG001
    mean: Tensor | None,
    scale: Tensor,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    n_blocks, n_sums = -(-(x.numel() // x.shape[-1]) // ROWS_A_PROGRAM), 1 if mean is None else 2
    sums = x.new_empty((n_blocks, n_sums, x.shape[-1]), dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.contiguous_format), sums
