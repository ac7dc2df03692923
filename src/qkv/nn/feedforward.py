"""What happens at each position by itself: f(xW₁ + b₁)W₂ + b₂."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.choices import Activation
from qkv.nn.compiled import expands_at_once, reads_compiled
from qkv.nn.gradients import expanded, trains_compiled
from qkv.nn.tap import Tap, is_looked_at
from qkv.tensors import Residual

TAIL = (0.9999962, 1.151225, 0.45857096, 0.05380521, -0.0084041990, 8.957442e-4, -5.592328e-5, 1.4766356e-6)
"""−log₂ Φ(−a) as a polynomial of a, from the constant on: by least greatest error, relative or of 1e-5, for a ≤ 6.5;
it grows on from there."""


def activate(x: Tensor, activation: Activation) -> Tensor:
    match activation:
        case Activation.RELU:
            return F.relu(x)
        case Activation.GELU:
            return gelu_by_a_power(x) if reads_compiled(x) else F.gelu(x)
        case Activation.GELU_TANH:
            return F.gelu(x, approximate="tanh")
        case Activation.SILU:
            return F.silu(x)


def gelu_by_a_power(x: Tensor) -> Tensor:
    """x·Φ(x) = max(x, 0) − |x|·Φ(−|x|), to 5e-7, as exact as float32's own: erf takes a GPU longer than its memory."""
    a = x.float().abs()
    power = torch.full_like(a, TAIL[-1])
    for term in TAIL[-2::-1]:
        power = power * a + term
    return (x.float().relu() - a * torch.exp2(-power)).to(x.dtype)


class FeedForward(nn.Module):
    """Two matrices with an activation between, or three with a gate (arXiv:2002.05202). Tap: `hidden`."""

    def __init__(
        self, d_model: int, d_ff: int, *, activation: Activation = Activation.RELU, gated: bool = False,
        bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.activation, self.has_bias = activation, bias
        self.expand = nn.Linear(d_model, d_ff, bias=bias)
        self.gate = nn.Linear(d_model, d_ff, bias=bias) if gated else None
        self.contract = nn.Linear(d_ff, d_model, bias=bias)
        self.hidden = Tap()

    def forward(self, x: Residual) -> Residual:
        hidden = self._expanded(x) if self.gate is None else self._gated(x, self.gate)
        return self.contract(self.hidden(hidden))

    def _gated(self, x: Tensor, gate: nn.Module) -> Tensor:
        is_usual = all(type(part) is nn.Linear and not is_looked_at(part) for part in (gate, self.expand))
        if not (is_usual and isinstance(gate, nn.Linear) and trains_compiled(x)):
            return activate(gate(x), self.activation) * self.expand(x)
        # By one product, so that x is read once, and its gradient comes of one.
        bias = torch.cat((gate.bias, self.expand.bias)) if self.has_bias else None
        opened, wide = F.linear(x, torch.cat((gate.weight, self.expand.weight)), bias).chunk(2, dim=-1)
        return activate(opened, self.activation) * wide

    def _expanded(self, x: Tensor) -> Tensor:
        expand = self.expand
        is_usual = type(expand) is nn.Linear and not is_looked_at(expand)
        if is_usual and self.has_bias and self.activation is Activation.GELU:
            if trains_compiled(x):
                return expanded(x, expand.weight, expand.bias)
            if expands_at_once(x, expand.weight):
                # Not at the top: Triton comes with torch for a GPU alone.
                from qkv.nn.expanding import expand_gelu

                return expand_gelu(x, expand.weight, expand.bias)
        return activate(expand(x), self.activation)
