"""Where do gradients come by kernels of ours? In what is compiled to train on a GPU with products in 16 bits."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def trains_compiled(x: Tensor) -> bool:
    return (
        x.is_cuda
        and torch.compiler.is_compiling()
        and torch.is_grad_enabled()
        and torch.is_autocast_enabled("cuda")
        and torch.get_autocast_dtype("cuda") is torch.bfloat16
    )


def expanded(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU(x·Wᵀ + b): the activation's pass adds the bias, too, and on the way back adds up its gradient."""
    from qkv.nn.gradient_kernels import biased_gelu

    return biased_gelu(F.linear(x, weight), bias)


def projected(x: Tensor, weight: Tensor, bias: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """x·Wᵀ + b, cut in three: their gradients are put side by side and added up for the bias in one pass."""
    return _Projected.apply(x, weight, bias, tuple(widths))


class _Projected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, widths: tuple[int, ...]) -> tuple[Tensor, ...]:  # noqa: ANN401
        short, used = x.to(torch.bfloat16), weight.to(torch.bfloat16)
        ctx.save_for_backward(short, used)
        ctx.dtypes = x.dtype, weight.dtype, bias.dtype
        return F.linear(short, used, bias.to(torch.bfloat16)).split(widths, dim=-1)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        from qkv.nn.gradient_kernels import beside

        x, weight = ctx.saved_tensors
        first, second, third = (part.flatten(0, 1) for part in given)
        joined, sums = beside(first, second, third)
        of_x, of_weight, of_bias = ctx.dtypes
        return (
            (joined @ weight).view(x.shape).to(of_x),
            (joined.T @ x.flatten(0, 1)).to(of_weight),
            sums.sum(0).to(of_bias),
            None,
        )
