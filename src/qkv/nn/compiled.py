"""Is this pass one that was compiled to read texts on a GPU? There a shorter road may be taken."""

import torch
from torch import Tensor


def reads_compiled(x: Tensor) -> bool:
    """16-bit numbers on a GPU, in what torch.compile makes, without gradients."""
    is_short = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
    return is_short and torch.compiler.is_compiling() and not torch.is_grad_enabled()
