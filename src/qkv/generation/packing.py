"""Matrices laid out once as the CPU reads them fastest, for the many small steps of decoding.

A step multiplies a few rows by every weight. torch's usual product prepares the weights anew each time; oneDNN's takes
them prepared, which is 1.5 to 2.4 times as fast for 1 to 40 rows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from qkv.nn import Unembedding


@contextmanager
def packed(*parts: nn.Module) -> Iterator[None]:
    """Inside, the parts' products use prepared copies of their weights; results differ by rounding alone.

    Only for float32 on a CPU; elsewhere nothing changes.
    """
    changed: list[nn.Module] = []
    try:
        for module in [module for part in parts for module in part.modules()]:
            if type(module) is nn.Linear and _can_pack(module.weight):
                module.__dict__["forward"] = _product(module.weight, module.bias)
            elif isinstance(module, Unembedding) and _can_pack(module.weight):
                module.__dict__["forward"] = _unembedding(module)
            else:
                continue
            changed.append(module)
        yield
    finally:
        for module in changed:
            # Another thread may have been here meanwhile and taken it away: the usual product is as right.
            module.__dict__.pop("forward", None)


def _can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    prepared = torch.ops.mkldnn._reorder_linear_weight(weight.detach())  # noqa: SLF001 - what torch.compile uses too
    multiply = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001
    bias = None if bias is None else bias.detach()
    return lambda x: multiply(x, prepared, bias, "none", [], "")


def _unembedding(module: Unembedding) -> Callable[[Tensor], Tensor]:
    multiply = _product(module.weight, module.bias)
    return lambda x: module.logits(multiply(x * module.scale if module.scale != 1.0 else x))
