"""How does a Hopper GPU expand in one pass? In Triton: the product's tile gets its bias and GELU before it is written.

Apart, GELU reads and writes the widest tensor of a block once more. Tiles come and go by the GPU's tensor memory
accelerator; a program goes on to the next tile while the one before is written.
"""
# pyright: basic, reportMissingImports=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false

import torch
import triton
from torch import Tensor
from triton import language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from qkv.nn.compiled import TILE
from qkv.nn.gradient_kernels import gelu

DEPTH, WARPS, STAGES, GROUP = 64, 4, 3, 8
"""Of 15 choices the fastest on an H200, two programs a processor; GROUP rows of tiles share what is read of W."""
PROGRAMS = 2
"""A processor's."""


@triton.jit
def expand_tiles(
    x, weight, hidden, bias, n_rows, n_out, n_in, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Every num_programs-th tile of GELU(x·Wᵀ + b); n_out is a multiple of COLUMNS."""
    wide, high = n_out // COLUMNS, tl.cdiv(n_rows, ROWS)
    for tile in tl.range(tl.program_id(0), wide * high, tl.num_programs(0), flatten=True):
        group = tile // (GROUP * wide)
        size = tl.minimum(high - group * GROUP, GROUP)
        row = (group * GROUP + (tile % (GROUP * wide)) % size) * ROWS
        column = ((tile % (GROUP * wide)) // size) * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, n_in, DEPTH):
            total = tl.dot(x.load([row, k]), weight.load([column, k]).T, total)
        # By halves: fewer registers are at work at once.
        first, second = tl.split(tl.permute(tl.reshape(total, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
        at = column + tl.arange(0, COLUMNS // 2)
        first += tl.load(bias + at).to(tl.float32)[None, :]
        hidden.store([row, column], gelu(first).to(hidden.dtype))
        second += tl.load(bias + COLUMNS // 2 + at).to(tl.float32)[None, :]
        hidden.store([row, column + COLUMNS // 2], gelu(second).to(hidden.dtype))


@torch.library.custom_op("qkv::expand_gelu", mutates_args=())
def expand_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU(x·Wᵀ + b), for whom `compiled.expands_at_once`."""
    n_out, n_in = weight.shape
    rows = _aligned(x.reshape(-1, n_in))
    hidden = rows.new_empty(len(rows), n_out)
    shapes = ((rows, [TILE, DEPTH]), (_aligned(weight), [TILE, DEPTH]), (hidden, [TILE, TILE // 2]))
    described = [TensorDescriptor.from_tensor(tensor, shape) for tensor, shape in shapes]
    n_programs = min(PROGRAMS * n_processors(x.device), triton.cdiv(len(rows), TILE) * (n_out // TILE))
    expand_tiles[(n_programs,)](
        *described, bias, len(rows), n_out, n_in, ROWS=TILE, COLUMNS=TILE, DEPTH=DEPTH, GROUP=GROUP, num_warps=WARPS,
        num_stages=STAGES,
    )  # fmt: skip
    return hidden.view(*x.shape[:-1], n_out)


@expand_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # noqa: ARG001
    return x.new_empty(*x.shape[:-1], len(weight))


def n_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _aligned(tensor: Tensor) -> Tensor:
    """Without gaps and from a multiple of 16 bytes on, as the accelerator wants it: most are, a slice may not be."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
