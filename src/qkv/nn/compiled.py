"""Is this pass one that was compiled to read texts on a GPU? There a shorter road may be taken."""

import torch
from torch import Tensor

TILE = 128
"""Rows and columns that a program of `expanding.py` makes at once."""


def reads_compiled(x: Tensor) -> bool:
    """16-bit numbers on a GPU, in what torch.compile makes (torch.export does not), without gradients."""
    is_short = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
    return is_short and torch.compiler.is_dynamo_compiling() and not torch.is_grad_enabled()


def expands_at_once(x: Tensor, weight: Tensor) -> bool:
    """Where the kernel of `expanding.py` is faster than a product and then GELU: on Hopper, for which its tiles are
    made, if there is a tile for each processor. Rows of x and W must begin at multiples of 16 bytes.
    """
    n_out, n_in = weight.shape
    if not reads_compiled(x) or x.dtype != weight.dtype or n_out % TILE or n_in % 8:
        return False
    gpu = torch.cuda.get_device_properties(x.device)
    n_tiles = -(-x.numel() // n_in // TILE) * (n_out // TILE)
    return torch.version.hip is None and gpu.major == 9 and n_tiles >= gpu.multi_processor_count
