"""Compute a tensor once under torch.compile instead of in every kernel that reads it.

torch.compile inlines elementwise operations into each kernel that uses their result. All rows, heads and layers share
the sines and cosines of the rotary angles, but inlining would recompute them for every element of every query and key,
in both the forward and the backward pass.
"""

import torch
from torch import Tensor


def materialize_under_compile(table: Tensor) -> Tensor:
    """Return the table unchanged. Under torch.compile, the table is first written to memory.

    No gradient flows through the table.
    """
    # torch.export, for which is_compiling() is also true, is excluded because an exported program must use only
    # PyTorch's own operators.
    return opaque_clone(table) if torch.compiler.is_dynamo_compiling() else table


@torch.library.custom_op("qkv::opaque_clone", mutates_args=())
def opaque_clone(table: Tensor) -> Tensor:
    """Copy a tensor with an operator that torch.compile cannot inline."""
    return table.clone()


@opaque_clone.register_fake
def _(table: Tensor) -> Tensor:
    return torch.empty_like(table)
