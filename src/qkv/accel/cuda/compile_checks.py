"""Check whether code is compiled for inference on a GPU and may use fused implementations."""

import torch
from torch import Tensor

TILE = 128
"""Number of rows and columns per output tile in the kernel of `linear_gelu_kernel.py`."""


def is_compiled_for_inference(x: Tensor) -> bool:
    """Return whether torch.compile (not torch.export) is compiling this code for 16-bit inference on a GPU."""
    is_16_bit_on_gpu = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
    return is_16_bit_on_gpu and torch.compiler.is_dynamo_compiling() and not torch.is_grad_enabled()


def should_fuse_linear_gelu_for_inference(x: Tensor, weight: Tensor) -> bool:
    """Return whether the fused kernel supports these shapes and is faster than a matmul followed by GELU.

    The kernel's tile sizes are tuned for Hopper GPUs, and there must be at least one tile per multiprocessor. Rows of x
    and W must start at multiples of 16 bytes.
    """
    n_out, n_in = weight.shape
    if not is_compiled_for_inference(x) or x.dtype != weight.dtype or n_out % TILE or n_in % 8:
        return False
    gpu = torch.cuda.get_device_properties(x.device)
    n_tiles = -(-x.numel() // n_in // TILE) * (n_out // TILE)
    return torch.version.hip is None and gpu.major == 9 and n_tiles >= gpu.multi_processor_count
