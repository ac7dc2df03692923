"""Where does a gradient die: on its way down through layers, and back through time?"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv.choices import CellKind
from qkv.inspection import new_figure
from qkv.lessons.console import print_section, print_table, print_text
from qkv.lessons.figure_style import BLUE, GREEN, ORANGE, RED, DrawFigure, Figure, label_axes
from qkv.nn import CAUSAL, Attention, FeedForward, HeadConfig, LayerNorm
from qkv.nn.recurrent import build_recurrence

DEPTH, D, N = 24, 64, 16
DISTANCES = (1, 2, 4, 8, 16, 32, 64, 128)
STYLES = ((RED, "o"), (ORANGE, "s"), (GREEN, "^"), (BLUE, "D"))


@dataclass(frozen=True)
class Wiring:
    """What a stack has besides attention and feed-forward."""

    name: str
    residual: bool
    normed: bool


WIRINGS = (
    Wiring("neither", residual=False, normed=False),
    Wiring("LayerNorm", residual=False, normed=True),
    Wiring("residual", residual=True, normed=False),
    Wiring("both", residual=True, normed=True),
)


def by_depth(wiring: Wiring) -> Float[Tensor, " layer"]:
    """‖∂loss/∂input of layer l‖ for l = 0 … DEPTH, against that at the top, in a new stack."""
    x = torch.randn(4, N, D, dtype=torch.float64, requires_grad=True)
    inputs = [x]
    for _ in range(DEPTH):
        for part in (Attention(D, HeadConfig.split(D, 4)), FeedForward(D, 4 * D)):
            write = part.double()(LayerNorm(D).double()(x) if wiring.normed else x)
            x = x + write if wiring.residual else write
        inputs.append(x)
    loss = (x * torch.randn_like(x)).sum()
    norms = torch.stack([gradient.norm() for gradient in torch.autograd.grad(loss, inputs)])
    return norms / norms[-1]


def readers() -> dict[str, nn.Module]:
    """Four ways to read a sequence. The gate of the second LSTM is held open, as training may learn to do."""
    lstm = {"width": D, "d_state": D, "n_layers": 1, "bidirectional": False, "dropout": 0.0}
    closed, opened = build_recurrence(CellKind.LSTM, **lstm), build_recurrence(CellKind.LSTM, **lstm)
    with torch.no_grad():
        opened.get_parameter("bias_ih_l0")[D : 2 * D] = 5.0
    return {
        "RNN": nn.RNN(D, D, batch_first=True),
        "LSTM": closed,
        "LSTM, gate open": opened,
        "attention": Attention(D, HeadConfig.split(D, 4)),
    }


def by_distance(reader: nn.Module) -> Float[Tensor, " distance"]:
    """‖∂last output/∂input k positions back‖, against that of the last input."""
    n = max(DISTANCES) + 1
    x = torch.randn(8, n, D, dtype=torch.float64, requires_grad=True)
    reader.double()
    states = reader(x, mask=CAUSAL) if isinstance(reader, Attention) else reader(x)[0]
    loss = (states[:, -1] * torch.randn(8, D)).sum()
    norms = torch.autograd.grad(loss, x)[0].norm(dim=(0, 2))
    return (norms / norms[-1]).flip(0)[list(DISTANCES)]


def lesson(seed: int) -> DrawFigure:  # noqa: ARG001 - torch's chance has started at the seed
    depth = {wiring.name: by_depth(wiring) for wiring in WIRINGS}
    print_section(f"Down through {DEPTH} layers: the gradient at a layer's input, against the top's")
    shown = (DEPTH, DEPTH - 1, DEPTH - 4, DEPTH // 2, 4, 0)
    print_table(["input of layer", *depth], [
        ("top" if layer == DEPTH else str(layer), *(f"{norms[layer].item():.1e}" for norms in depth.values()))
        for layer in shown
    ])  # fmt: skip
    print_text("""New stacks of attention and feed-forward, torch's own random start. With neither, every layer shrinks
        numbers and gradient alike, and nothing reaches the bottom. LayerNorm brings the numbers back to size at
        every layer, and so keeps the gradient alive. The residual gives the gradient a road that no layer
        multiplies; both together lose nothing.""")

    distance = {name: by_distance(reader) for name, reader in readers().items()}
    print_section("Back through time: gradient of the last output at an input k positions before it")
    print_table(["k", *distance], [
        (k, *(f"{norms[i].item():.1e}" for norms in distance.values())) for i, k in enumerate(DISTANCES)
    ])  # fmt: skip
    print_text("""Against the last input's own gradient. An RNN multiplies once a step, so the gradient dies with the
        distance. An LSTM's cell passes through a gate: half open, as it starts, it halves each step; held open
        (bias 5) it carries far, and may even grow. Attention looks back in one step, whatever the distance.""")
    return lambda: _draw(depth, distance)


def _draw(depth: dict[str, Tensor], distance: dict[str, Tensor]) -> Figure:
    figure = new_figure(width=12.0, height=4.6)
    down, back = figure.subplots(1, 2)
    for (name, norms), (colour, marker) in zip(depth.items(), STYLES, strict=True):
        down.plot(range(DEPTH + 1), norms.numpy(), color=colour, marker=marker, markersize=4, label=name)
    for (name, norms), (colour, marker) in zip(distance.items(), STYLES, strict=True):
        back.plot(DISTANCES, norms.numpy(), color=colour, marker=marker, label=name)
    for axes in (down, back):
        axes.set_yscale("log")
        axes.legend(frameon=False)
    down.invert_xaxis()
    back.set_xscale("log", base=2)
    back.set_xticks(DISTANCES, [str(k) for k in DISTANCES])
    label_axes(
        down, title="Down: with residual and LayerNorm, or without", x="layer (top to bottom)", y="gradient (top = 1)"
    )
    label_axes(back, title="Back: one output and an input k positions before", x="distance k", y="gradient (k = 0: 1)")
    figure.suptitle("Vanishing gradients: residuals carry them down, attention carries them back")
    return figure
