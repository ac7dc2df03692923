"""What happens at each position by itself: f(xW₁ + b₁)W₂ + b₂."""

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
    """Two matrices with an activation between, or three with a gate (arXiv:2002.05202). Tap: `hidden`."""

    def __init__(
        self, d_model: int, d_ff: int, *, activation: Activation = Activation.RELU, gated: bool = False,
        bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.activation = activation
        self.expand = nn.Linear(d_model, d_ff, bias=bias)
        self.gate = nn.Linear(d_model, d_ff, bias=bias) if gated else None
        self.contract = nn.Linear(d_ff, d_model, bias=bias)
        self.hidden = Tap()

    def forward(self, x: Residual) -> Residual:
        if self.gate is None:
            hidden = activate(self.expand(x), self.activation)
        else:
            hidden = activate(self.gate(x), self.activation) * self.expand(x)
        return self.contract(self.hidden(hidden))
