"""Where do gradients come by kernels of ours? In what is compiled to train on a GPU with products in 16 bits."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qkv.nn.norm import LayerNorm, RMSNorm


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


def forked(x: Tensor, norm: LayerNorm | RMSNorm) -> tuple[Tensor, Tensor]:
    """x, and normed as products read it: on the way back, both gradients and those of γ and β come of one pass."""
    is_centred = isinstance(norm, LayerNorm)
    return _Forked.apply(x, norm.weight, norm.bias if is_centred else None, norm.epsilon, is_centred)


class _Forked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        epsilon: float,
        is_centred: bool,  # noqa: FBT001 - torch gives them by place
    ) -> tuple[Tensor, Tensor]:
        wide, mean = x.float(), None
        if is_centred:
            normed, mean, scale = torch.native_layer_norm(wide, weight.shape, weight, bias, epsilon)
        else:
            scale = (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
            normed = wide * scale * weight
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.has_bias = bias is not None
        return x.view_as(x), normed.to(torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        from qkv.nn.norm_kernel import norm_gradients

        kept, of_normed = given
        x, weight, mean, scale = ctx.saved_tensors
        gradient, sums = norm_gradients(of_normed, kept, x, weight, mean, scale)
        towards = sums.sum(0).to(weight.dtype)
        return gradient, towards[0], towards[1] if ctx.has_bias else None, None, None


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
