"""Position-wise feed-forward layer, f(xW₁ + b₁)W₂ + b₂, with an optional gate."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.accel.cuda.compile_checks import is_compiled_for_inference, should_fuse_linear_gelu_for_inference
from qkv.accel.cuda.fused_autograd import is_compiling_cuda_bf16_autocast_training, linear_fused_bias_gelu
from qkv.choices import Activation
from qkv.nn.tap import Tap, has_hooks_or_is_active_tap
from qkv.tensors import Residual

NORMAL_TAIL_COEFFICIENTS = (
    0.9999962, 1.151225, 0.45857096, 0.05380521, -0.0084041990, 8.957442e-4, -5.592328e-5, 1.4766356e-6,
)  # fmt: skip
"""Coefficients of a polynomial that approximates −log₂ Φ(−a), constant term first.

The polynomial is a minimax fit for 0 ≤ a ≤ 6.5 (of the relative error, or of an absolute error of 1e-5). Beyond 6.5, it
keeps growing, so Φ(−a) still approaches 0.
"""


def activate(x: Tensor, activation: Activation) -> Tensor:
    match activation:
        case Activation.RELU:
            return F.relu(x)
        case Activation.GELU:
            return erf_gelu_by_exp2(x) if is_compiled_for_inference(x) else F.gelu(x)
        case Activation.GELU_TANH:
            return F.gelu(x, approximate="tanh")
        case Activation.SILU:
            return F.silu(x)


def erf_gelu_by_exp2(x: Tensor) -> Tensor:
    """Compute GELU as max(x, 0) − |x|·Φ(−|x|), where Φ is evaluated as a power of 2.

    The error is at most 5e-7, as with a float32 erf. On a GPU, evaluating erf takes longer than reading and writing the
    tensors.
    """
    a = x.float().abs()
    power = torch.full_like(a, NORMAL_TAIL_COEFFICIENTS[-1])
    for coefficient in NORMAL_TAIL_COEFFICIENTS[-2::-1]:
        power = power * a + coefficient
    return (x.float().relu() - a * torch.exp2(-power)).to(x.dtype)


class FeedForward(nn.Module):
    """Feed-forward layer with two matrices and an activation, or with three matrices and a gate (arXiv:2002.05202).

    Tap: `hidden`, the input of the down projection.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        activation: Activation = Activation.RELU,
        gated: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.activation, self.has_bias = activation, bias
        self.up_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.gate_proj = nn.Linear(d_model, d_ff, bias=bias) if gated else None
        self.down_proj = nn.Linear(d_ff, d_model, bias=bias)
        self.hidden = Tap()

    def forward(self, x: Residual) -> Residual:
        hidden = self._ungated_hidden(x) if self.gate_proj is None else self._gated_hidden(x, self.gate_proj)
        return self.down_proj(self.hidden(hidden))

    def _gated_hidden(self, x: Tensor, gate_proj: nn.Module) -> Tensor:
        can_fuse = all(
            type(linear) is nn.Linear and not has_hooks_or_is_active_tap(linear) for linear in (gate_proj, self.up_proj)
        )
        if not (can_fuse and isinstance(gate_proj, nn.Linear) and is_compiling_cuda_bf16_autocast_training(x)):
            return activate(gate_proj(x), self.activation) * self.up_proj(x)
        # With one matmul for both projections, x is read only once and its gradient requires only one matmul.
        bias = torch.cat((gate_proj.bias, self.up_proj.bias)) if self.has_bias else None
        gate, up = F.linear(x, torch.cat((gate_proj.weight, self.up_proj.weight)), bias).chunk(2, dim=-1)
        return activate(gate, self.activation) * up

    def _ungated_hidden(self, x: Tensor) -> Tensor:
        up_proj = self.up_proj
        can_fuse = type(up_proj) is nn.Linear and not has_hooks_or_is_active_tap(up_proj)
        if can_fuse and self.has_bias and self.activation is Activation.GELU:
            if is_compiling_cuda_bf16_autocast_training(x):
                return linear_fused_bias_gelu(x, up_proj.weight, up_proj.bias)
            if should_fuse_linear_gelu_for_inference(x, up_proj.weight):
                # Imported here because Triton is installed only with CUDA builds of PyTorch.
                from qkv.accel.cuda.linear_gelu_kernel import fused_linear_gelu

                return fused_linear_gelu(x, up_proj.weight, up_proj.bias)
        return activate(up_proj(x), self.activation)
