"""Bringing a vector to a standard size: LayerNorm and RMSNorm."""

import torch
from torch import nn
from torch.nn import functional as F

from qkv.choices import NormKind
from qkv.tensors import Residual


class LayerNorm(nn.Module):
    """(x − mean) / √(variance + ε) · γ + β over one token's numbers; the variance is the population's (÷ d)."""

    def __init__(self, d_model: int, *, epsilon: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model)) if bias else None

    def forward(self, x: Residual) -> Residual:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


class RMSNorm(nn.Module):
    """x / √(mean of x² + ε) · γ: no mean taken away, no β. arXiv:1910.07467."""

    def __init__(self, d_model: int, *, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x: Residual) -> Residual:
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


def norm(kind: NormKind, d_model: int, *, epsilon: float = 1e-5, bias: bool = True) -> LayerNorm | RMSNorm:
    match kind:
        case NormKind.LAYER:
            return LayerNorm(d_model, epsilon=epsilon, bias=bias)
        case NormKind.RMS:
            return RMSNorm(d_model, epsilon=epsilon)
