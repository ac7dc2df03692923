"""Lesson: vanishing gradients across many layers and over long distances between positions."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv.choices import CellKind
from qkv.inspection import new_figure
from qkv.lessons.console import print_section, print_table, print_text
from qkv.lessons.figure_style import BLUE, GREEN, ORANGE, RED, DrawFigure, Figure, style_and_label_axes
from qkv.nn import CAUSAL, Attention, FeedForward, HeadConfig
from qkv.nn.norm import LayerNorm
from qkv.nn.recurrent import build_recurrence

N_STACK_LAYERS, D, N = 24, 64, 16
DISTANCES = (1, 2, 4, 8, 16, 32, 64, 128)
STYLES = ((RED, "o"), (ORANGE, "s"), (GREEN, "^"), (BLUE, "D"))


@dataclass(frozen=True)
class StackDesign:
    """The design of a stack: with or without residual connections, and with or without LayerNorm."""

    name: str
    residual: bool
    normed: bool


STACK_DESIGNS = (
    StackDesign("neither", residual=False, normed=False),
    StackDesign("LayerNorm", residual=False, normed=True),
    StackDesign("residual", residual=True, normed=False),
    StackDesign("both", residual=True, normed=True),
)


def relative_gradient_norm_by_depth(design: StackDesign) -> Float[Tensor, " layer"]:
    """Return the gradient norm at the input of each layer of an untrained stack, relative to the norm at its output.

    The last value is the relative norm at the output, which is 1.
    """
    x = torch.randn(4, N, D, dtype=torch.float64, requires_grad=True)
    inputs = [x]
    for _ in range(N_STACK_LAYERS):
        for sublayer in (Attention(D, HeadConfig.split(D, 4)), FeedForward(D, 4 * D)):
            output = sublayer.double()(LayerNorm(D).double()(x) if design.normed else x)
            x = x + output if design.residual else output
        inputs.append(x)
    loss = (x * torch.randn_like(x)).sum()
    norms = torch.stack([gradient.norm() for gradient in torch.autograd.grad(loss, inputs)])
    return norms / norms[-1]


def build_recurrent_and_attention_layers() -> dict[str, nn.Module]:
    """Build an RNN, two LSTMs and an attention layer.

    The forget gate of the second LSTM is open, which can also happen during training.
    """
    lstm = {"d_input": D, "d_state": D, "n_layers": 1, "bidirectional": False, "dropout": 0.0}
    default_lstm, open_lstm = build_recurrence(CellKind.LSTM, **lstm), build_recurrence(CellKind.LSTM, **lstm)
    with torch.no_grad():
        open_lstm.get_parameter("bias_ih_l0")[D : 2 * D] = 5.0
    return {
        "RNN": nn.RNN(D, D, batch_first=True),
        "LSTM": default_lstm,
        "LSTM, gate open": open_lstm,
        "attention": Attention(D, HeadConfig.split(D, 4)),
    }


def relative_gradient_norm_by_distance(model: nn.Module) -> Float[Tensor, " distance"]:
    """Return the relative norm of the gradient of the last output with respect to inputs at several distances.

    For each distance k, the input is k positions earlier than the output. The norms are relative to the gradient norm
    for the last input.
    """
    n = max(DISTANCES) + 1
    x = torch.randn(8, n, D, dtype=torch.float64, requires_grad=True)
    model.double()
    states = model(x, mask=CAUSAL) if isinstance(model, Attention) else model(x)[0]
    loss = (states[:, -1] * torch.randn(8, D)).sum()
    norms = torch.autograd.grad(loss, x)[0].norm(dim=(0, 2))
    return (norms / norms[-1]).flip(0)[list(DISTANCES)]


def lesson(seed: int) -> DrawFigure:  # noqa: ARG001 - `run` has already seeded torch
    depth = {design.name: relative_gradient_norm_by_depth(design) for design in STACK_DESIGNS}
    print_section(f"Across {N_STACK_LAYERS} layers: gradient norm at the input of a layer, relative to the top")
    selected_layers = (N_STACK_LAYERS, N_STACK_LAYERS - 1, N_STACK_LAYERS - 4, N_STACK_LAYERS // 2, 4, 0)
    print_table(["input of layer", *depth], [
        ("top" if layer == N_STACK_LAYERS else str(layer), *(f"{norms[layer].item():.1e}" for norms in depth.values()))
        for layer in selected_layers
    ])  # fmt: skip
    print_text("""These untrained stacks consist of attention and feed-forward layers with PyTorch's default
        initialization. With neither residual connections nor LayerNorm, every layer shrinks the activations and the
        gradient, and almost no gradient reaches the first layer. LayerNorm rescales the activations at every layer,
        which preserves the gradient. A residual connection provides a path on which the gradient bypasses the layer.
        With both residual connections and LayerNorm, the gradient does not vanish.""")

    distance = {
        name: relative_gradient_norm_by_distance(model)
        for name, model in build_recurrent_and_attention_layers().items()
    }
    print_section("Across positions: gradient norm of the last output w.r.t. the input k positions earlier")
    print_table(["k", *distance], [
        (k, *(f"{norms[i].item():.1e}" for norms in distance.values())) for i, k in enumerate(DISTANCES)
    ])  # fmt: skip
    print_text("""The values are relative to the gradient norm for the last input. In an RNN, the gradient is multiplied
        by a matrix at every step and vanishes with distance. In an LSTM, the cell state is multiplied by a forget gate
        at every step. At initialization, the forget gate is half open and halves the gradient at every step. If the
        forget gate is open (bias 5), the gradient is preserved over long distances and may even grow. Attention
        connects any two positions in a single step, regardless of their distance.""")
    return lambda: _draw_relative_gradient_norms(depth, distance)


def _draw_relative_gradient_norms(by_depth: dict[str, Tensor], by_distance: dict[str, Tensor]) -> Figure:
    figure = new_figure(width=12.0, height=4.6)
    depth_axes, distance_axes = figure.subplots(1, 2)
    for (name, norms), (color, marker) in zip(by_depth.items(), STYLES, strict=True):
        depth_axes.plot(range(N_STACK_LAYERS + 1), norms.numpy(), color=color, marker=marker, markersize=4, label=name)
    for (name, norms), (color, marker) in zip(by_distance.items(), STYLES, strict=True):
        distance_axes.plot(DISTANCES, norms.numpy(), color=color, marker=marker, label=name)
    for axes in (depth_axes, distance_axes):
        axes.set_yscale("log")
        axes.legend(frameon=False)
    depth_axes.invert_xaxis()
    distance_axes.set_xscale("log", base=2)
    distance_axes.set_xticks(DISTANCES, [str(k) for k in DISTANCES])
    style_and_label_axes(
        depth_axes,
        title="By depth, with and without residual connections and LayerNorm",
        x="layer",
        y="relative gradient norm",
    )
    style_and_label_axes(
        distance_axes, title="By distance between output and input", x="distance k", y="relative gradient norm"
    )
    figure.suptitle("Residual connections preserve gradients across layers; attention preserves them across positions")
    return figure
