"""Position-wise feed-forward layer, f(xW₁ + b₁)W₂ + b₂, with an optional gate."""

from torch import Tensor, nn
from torch.nn import functional as F

from qkv.choices import Activation
from qkv.nn.tap import Tap
from qkv.tensors import Residual


def activate(x: Tensor, activation: Activation) -> Tensor:
    match activation:
        case Activation.RELU:
            return F.relu(x)
        case Activation.GELU:
            return F.gelu(x)
        case Activation.GELU_TANH:
            return F.gelu(x, approximate="tanh")
        case Activation.SILU:
            return F.silu(x)


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
        if self.gate_proj is None:
            hidden = activate(self.up_proj(x), self.activation)
        else:
            hidden = activate(self.gate_proj(x), self.activation) * self.up_proj(x)
        return self.down_proj(self.hidden(hidden))
