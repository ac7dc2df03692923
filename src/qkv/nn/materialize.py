"""Compute a tensor once under torch.compile instead of in every kernel that reads it.

torch.compile inlines elementwise operations into each kernel that uses their result. For sine and cosine of rotary
angles, which all rows, heads and layers share, this would recompute them for every element of every query and key, in
the forward and the backward pass.
"""

import torch
from torch import Tensor


def materialize_under_compile(table: Tensor) -> Tensor:
    """Returns the table unchanged and, under torch.compile, written to memory first.

    No gradient flows through the table.
    """
    # This does not apply to torch.export, for which is_compiling() is also true, because an exported program must use
    # only the operators of PyTorch itself.
    return opaque_clone(table) if torch.compiler.is_dynamo_compiling() else table


@torch.library.custom_op("qkv::opaque_clone", mutates_args=())
def opaque_clone(table: Tensor) -> Tensor:
    """Copy a tensor with an operator that torch.compile cannot inline."""
    return table.clone()


@opaque_clone.register_fake
def _(table: Tensor) -> Tensor:
    return torch.empty_like(table)
