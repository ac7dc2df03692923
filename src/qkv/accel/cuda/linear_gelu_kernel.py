"""Triton kernel for GELU(x·Wᵀ + b) on Hopper GPUs.

The bias and GELU are applied to each output tile before it is stored. Separate operations would read and write the
widest tensor of a block one additional time. Tiles are loaded and stored by the tensor memory accelerator (TMA), so a
persistent program can start on its next tile while the previous one is being stored.
"""
# pyright: basic, reportMissingImports=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false

import torch
import triton
from torch import Tensor
from triton import language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from qkv.accel.cuda.compile_checks import TILE
from qkv.accel.cuda.fused_autograd_kernels import gelu

DEPTH, WARPS, STAGES, GROUP = 64, 4, 3, 8
"""Kernel settings that were the fastest of 15 configurations measured on an H200.

GROUP rows of tiles are processed together to reuse tiles of W from the cache.
"""
PROGRAMS_PER_SM = 2
"""Number of persistent programs per streaming multiprocessor."""


@triton.jit
def linear_gelu_kernel(
    x, weight, hidden, bias, n_rows, n_out, n_in, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Compute every num_programs-th tile of GELU(x·Wᵀ + b). `n_out` must be a multiple of COLUMNS."""
    column_tiles, row_tiles = n_out // COLUMNS, tl.cdiv(n_rows, ROWS)
    for tile in tl.range(tl.program_id(0), column_tiles * row_tiles, tl.num_programs(0), flatten=True):
        group = tile // (GROUP * column_tiles)
        group_rows = tl.minimum(row_tiles - group * GROUP, GROUP)
        row = (group * GROUP + (tile % (GROUP * column_tiles)) % group_rows) * ROWS
        column = ((tile % (GROUP * column_tiles)) // group_rows) * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, n_in, DEPTH):
            total = tl.dot(x.load([row, k]), weight.load([column, k]).T, total)
        # The two halves of the tile are stored one after the other because this needs fewer registers.
        first, second = tl.split(tl.permute(tl.reshape(total, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
        columns = column + tl.arange(0, COLUMNS // 2)
        first += tl.load(bias + columns).to(tl.float32)[None, :]
        hidden.store([row, column], gelu(first).to(hidden.dtype))
        second += tl.load(bias + COLUMNS // 2 + columns).to(tl.float32)[None, :]
        hidden.store([row, column + COLUMNS // 2], gelu(second).to(hidden.dtype))


@torch.library.custom_op("qkv::fused_linear_gelu", mutates_args=())
def fused_linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute GELU(x·Wᵀ + b) for inputs that satisfy `compile_checks.should_fuse_linear_gelu_for_inference`."""
    n_out, n_in = weight.shape
    rows = _align_for_tma(x.reshape(-1, n_in))
    hidden = rows.new_empty(len(rows), n_out)
    blocks = ((rows, [TILE, DEPTH]), (_align_for_tma(weight), [TILE, DEPTH]), (hidden, [TILE, TILE // 2]))
    descriptors = [TensorDescriptor.from_tensor(tensor, shape) for tensor, shape in blocks]
    n_programs = min(PROGRAMS_PER_SM * multiprocessor_count(x.device), triton.cdiv(len(rows), TILE) * (n_out // TILE))
    linear_gelu_kernel[(n_programs,)](
        *descriptors, bias, len(rows), n_out, n_in, ROWS=TILE, COLUMNS=TILE, DEPTH=DEPTH, GROUP=GROUP, num_warps=WARPS,
        num_stages=STAGES,
    )  # fmt: skip
    return hidden.view(*x.shape[:-1], n_out)


@fused_linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # noqa: ARG001
    return x.new_empty(*x.shape[:-1], len(weight))


def multiprocessor_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _align_for_tma(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor whose address is a multiple of 16 bytes, as required by TMA."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
