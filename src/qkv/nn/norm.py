"""Normalization layers.

Every norm has a parameter `weight` (γ). It also has a method `scale`, which `inspection` uses to attribute a logit to
the layers that wrote to the residual stream: for a fixed scale, a norm is an affine function of its input.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.choices import NormKind
from qkv.tensors import Residual


class LayerNorm(nn.Module):
    """Layer normalization, (x − mean) / √(variance + ε) · γ + β, with the biased variance (divided by d)."""

    def __init__(self, d_model: int, *, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model)) if bias else None

    def forward(self, x: Residual) -> Residual:
        # Every token is normalized by itself, over its d_model elements.
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def scale(self, x: Tensor) -> Tensor:
        """Return the number by which the centered elements of each vector are multiplied before γ."""
        return (x.var(-1, correction=0, keepdim=True) + self.eps).rsqrt()


class RMSNorm(nn.Module):
    """Root-mean-square normalization, x / √(mean of x² + ε) · γ, without centering and without β (arXiv:1910.07467)."""

    def __init__(self, d_model: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x: Residual) -> Residual:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def scale(self, x: Tensor) -> Tensor:
        """Return the number by which the elements of each vector are multiplied before γ."""
        return (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()


Norm = LayerNorm | RMSNorm


def make_norm(kind: NormKind, d_model: int, *, eps: float = 1e-5, bias: bool = True) -> Norm:
    """Create a norm. Only a LayerNorm can have a bias."""
    match kind:
        case NormKind.LAYER:
            return LayerNorm(d_model, eps=eps, bias=bias)
        case NormKind.RMS:
            return RMSNorm(d_model, eps=eps)
