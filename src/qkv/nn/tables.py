"""How is a table worked out once, where torch.compile would do so at every place that reads it?

It puts the work of one element into the kernels that use it: sine and cosine of a position's angles, which all rows,
heads and layers share, were computed anew for every number of every query and key, forwards and backwards.
"""

import torch
from torch import Tensor


def made_once(table: Tensor) -> Tensor:
    """The same, written to memory before anything reads it; a table, for no gradient goes through it."""
    # Not in torch.export, where is_compiling() holds as well: who loads a program has torch's operators alone.
    return written(table) if torch.compiler.is_dynamo_compiling() else table


@torch.library.custom_op("qkv::written", mutates_args=())
def written(table: Tensor) -> Tensor:
    """A copy, which the compiler cannot look into."""
    return table.clone()


@written.register_fake
def _(table: Tensor) -> Tensor:
    return torch.empty_like(table)
