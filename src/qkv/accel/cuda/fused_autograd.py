"""Autograd functions with fused backward kernels, for compiled bfloat16 training on a GPU."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qkv.nn.norm import LayerNorm, RMSNorm

VOCAB_MULTIPLE = 64
"""Multiple to which the vocabulary is padded because GPU matmuls are slow for odd sizes such as 50,257."""


def is_compiling_cuda_bf16_autocast_training(x: Tensor) -> bool:
    """Return whether this code is being compiled for training on a GPU with bfloat16 autocast."""
    return (
        x.is_cuda
        and torch.compiler.is_compiling()
        and torch.is_grad_enabled()
        and torch.is_autocast_enabled("cuda")
        and torch.get_autocast_dtype("cuda") is torch.bfloat16
    )


def linear_fused_bias_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute GELU(x·Wᵀ + b). The GELU kernel also adds the bias and, in the backward pass, sums the bias gradient."""
    from qkv.accel.cuda.fused_autograd_kernels import biased_gelu_forward

    return biased_gelu_forward(F.linear(x, weight), bias)


def fused_qkv_linear_bf16(x: Tensor, weight: Tensor, bias: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """Compute x·Wᵀ + b and split it into queries, keys and values of the given widths.

    In the backward pass, one kernel concatenates the three gradients and sums them for the bias.
    """
    return _FusedQKVLinearBF16.apply(x, weight, bias, tuple(widths))


def residual_and_bf16_norm_fused_backward(x: Tensor, norm: LayerNorm | RMSNorm) -> tuple[Tensor, Tensor]:
    """Return x and norm(x) in bfloat16.

    In the backward pass, one kernel computes the gradients of γ and β and adds the gradient through the norm to the
    gradient of the residual stream.
    """
    is_centered = isinstance(norm, LayerNorm)
    return _ResidualAndBF16NormFusedBackward.apply(
        x, norm.weight, norm.bias if is_centered else None, norm.eps, is_centered
    )


def fused_loss_sum(
    states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, chunk: int | None, smoothing: float
) -> Tensor:
    """Compute −Σ log p(target) with logits x·Wᵀ + b for at most `chunk` rows of `states` at a time.

    One kernel computes the loss and the gradient of the logits. Negative targets are ignored.
    """
    return _FusedLossSum.apply(states, weight, bias, targets, chunk or len(states), smoothing)


class _ResidualAndBF16NormFusedBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        is_centered: bool,  # noqa: FBT001 - autograd functions take positional arguments only
    ) -> tuple[Tensor, Tensor]:
        x_float, mean = x.float(), None
        if is_centered:
            normed, mean, scale = torch.native_layer_norm(x_float, weight.shape, weight, bias, eps)
        else:
            scale = (x_float.square().mean(-1, keepdim=True) + eps).rsqrt()
            normed = x_float * scale * weight
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.has_bias = bias is not None
        return x.view_as(x), normed.to(torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        from qkv.accel.cuda.norm_backward_kernel import norm_residual_backward_partial_sums

        grad_residual, grad_normed = grad_outputs
        x, weight, mean, scale = ctx.saved_tensors
        grad_x, partial_sums = norm_residual_backward_partial_sums(grad_normed, grad_residual, x, weight, mean, scale)
        grad_params = partial_sums.sum(0).to(weight.dtype)
        return grad_x, grad_params[0], grad_params[1] if ctx.has_bias else None, None, None


class _FusedQKVLinearBF16(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, widths: tuple[int, ...]) -> tuple[Tensor, ...]:  # noqa: ANN401
        x_bf16, weight_bf16 = x.to(torch.bfloat16), weight.to(torch.bfloat16)
        ctx.save_for_backward(x_bf16, weight_bf16)
        ctx.dtypes = x.dtype, weight.dtype, bias.dtype
        return F.linear(x_bf16, weight_bf16, bias.to(torch.bfloat16)).split(widths, dim=-1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        from qkv.accel.cuda.fused_autograd_kernels import concat_with_partial_column_sums

        x, weight = ctx.saved_tensors
        first, second, third = (grad.flatten(0, 1) for grad in grad_outputs)
        grad, partial_sums = concat_with_partial_column_sums(first, second, third)
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        return (
            (grad @ weight).view(x.shape).to(x_dtype),
            (grad.T @ x.flatten(0, 1)).to(weight_dtype),
            partial_sums.sum(0).to(bias_dtype),
            None,
        )


class _FusedLossSum(torch.autograd.Function):
    """Autograd function that computes the gradients in the forward pass, one chunk at a time.

    The kernel overwrites the logits of each chunk with their gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk: int,
        smoothing: float,
    ) -> Tensor:
        from qkv.accel.cuda.loss_kernel import cross_entropy_per_row_inplace

        needs_gradient, vocab_size, kind = any(ctx.needs_input_grad[:3]), len(weight), states.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
        n_padding = -vocab_size % VOCAB_MULTIPLE
        cast_weight = F.pad(weight.to(dtype), (0, 0, 0, n_padding))
        padded_bias = None if bias is None else F.pad(bias.to(dtype), (0, n_padding))
        losses, gradients = [], []
        for x, chunk_targets in zip(states.to(dtype).split(chunk), targets.split(chunk), strict=True):
            logits = F.linear(x, cast_weight, padded_bias)
            losses.append(
                cross_entropy_per_row_inplace(
                    logits, chunk_targets, vocab_size, smoothing, compute_gradient=needs_gradient
                ).sum()
            )
            if needs_gradient:
                weight_part = (logits.T @ x)[:vocab_size].to(weight.dtype)
                bias_part = None if bias is None else logits[:, :vocab_size].sum(0, dtype=bias.dtype)
                gradients.append(((logits @ cast_weight).to(states.dtype), weight_part, bias_part))
        if needs_gradient:
            state_parts, weight_parts, bias_parts = zip(*gradients, strict=True)
            ctx.gradients = (torch.cat(state_parts), sum(weight_parts), None if bias is None else sum(bias_parts))
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # noqa: ANN401
        # Scale in place and release the saved gradients, which are as large as the embedding matrix.
        gradients, ctx.gradients = ctx.gradients, ()
        return (*(None if gradient is None else gradient.mul_(grad_output) for gradient in gradients), None, None, None)
