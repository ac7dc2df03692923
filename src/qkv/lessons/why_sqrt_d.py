"""Why are scores divided by √d before the softmax?"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.inspection import new_figure
from qkv.lessons.console import print_section, print_table, print_text
from qkv.lessons.figure_style import BLUE, RED, DrawFigure, Figure, label_axes
from qkv.nn import AttentionInputs, masked_softmax

WIDTHS = (4, 16, 64, 256, 1024, 4096)
N_QUERIES, N_KEYS = 256, 16
LECTURE_B_SCORES = (112.0, 96.0, 16.0, 8.0)
LECTURE_B_WIDTH = 64


@dataclass(frozen=True)
class Measured:
    """What random queries and keys of one width give, at one scale."""

    variance: float
    largest: float
    """The weight of a query's best key, on average."""
    slope: float
    """How much the weights move when the scores do: the norm of ∂weights/∂scores, on average."""


def lesson(seed: int) -> DrawFigure:  # noqa: ARG001 - torch's chance has started at the seed
    plain = {width: _measure(width, scale=1.0) for width in WIDTHS}
    scaled = {width: _measure(width, scale=width**-0.5) for width in WIDTHS}

    print_section(f"Scores of random vectors: {N_QUERIES} queries, {N_KEYS} keys, all numbers N(0, 1)")
    print_text("A dot product adds d products of variance 1, so its variance is d and its usual size √d.")
    print_table(
        ["d", "var(q·k)", "var(q·k/√d)", "largest weight", "with √d", "∂softmax", "with √d"],
        [
            (width, plain[width].variance, scaled[width].variance, plain[width].largest, scaled[width].largest,
             plain[width].slope, scaled[width].slope)
            for width in WIDTHS
        ],
    )  # fmt: skip
    print_text(f"""Unscaled, the wider the vectors, the nearer the softmax comes to picking one key whole, and the
        smaller its derivative: nothing is left to learn from. Divided by √d, every width behaves the
        same. (Equal weights would be 1/{N_KEYS} = {1 / N_KEYS}.)""")
    _lecture_b()
    return lambda: _draw(plain, scaled)


def _measure(width: int, *, scale: float) -> Measured:
    queries, keys = torch.randn(1, 1, N_QUERIES, width), torch.randn(1, 1, N_KEYS, width)
    lookup = AttentionInputs(queries=queries, keys=keys, values=keys, scale=scale)
    scores = lookup.scores()
    weights = lookup.weights()
    return Measured(
        variance=scores.var().item(),
        largest=weights.amax(-1).mean().item(),
        slope=_slopes(scores[0, 0]).norm(dim=(1, 2)).mean().item(),
    )


def _slopes(scores: Float[Tensor, "query key"]) -> Float[Tensor, "query key key"]:
    """∂weights/∂scores of each query, by torch's own derivative."""
    scores = scores.clone().requires_grad_()
    weights = masked_softmax(scores[None, None])[0, 0]
    rows = [torch.autograd.grad(weights[:, key].sum(), scores, retain_graph=True)[0] for key in range(scores.shape[1])]
    return torch.stack(rows, dim=1)


def _lecture_b() -> None:
    print_section("Lecture B's scores, with and without")
    scores = torch.tensor(LECTURE_B_SCORES, dtype=torch.float64)
    rows: list[list[str]] = []
    for name, scale in (("q·k", 1.0), ("q·k/√64", LECTURE_B_WIDTH**-0.5)):
        scaled = scores * scale
        weights = masked_softmax(scaled[None, None, None])[0, 0, 0]
        slope = _slopes(scaled[None])[0, 0, 0].item()
        rows.append([f"scores {name}", *(f"{score:g}" for score in scaled.tolist()), ""])
        rows.append(["  weights", *(_short(weight) for weight in weights.tolist()), f"{slope:.2e}"])
    print_table(["", "token 1", "token 2", "token 3", "token 4", "∂a₁/∂s₁"], rows)
    print_text("""Unscaled, one token gets everything and the other three nothing, though 96 is not far from 112; and
        the derivative has all but vanished.""")


def _short(weight: float) -> str:
    return f"{weight:.7f}" if weight > 1e-4 else f"{weight:.1e}"


def _draw(plain: dict[int, Measured], scaled: dict[int, Measured]) -> Figure:
    figure = new_figure(width=12.0, height=4.0)
    spread, largest, slope = figure.subplots(1, 3)
    for measured, colour, name, marker in ((plain, RED, "q·k", "o"), (scaled, BLUE, "q·k/√d", "s")):
        rows = measured.values()
        style = {"color": colour, "marker": marker, "label": name}
        spread.plot(WIDTHS, [row.variance for row in rows], **style)
        largest.plot(WIDTHS, [row.largest for row in rows], **style)
        slope.plot(WIDTHS, [row.slope for row in rows], **style)
    for axes in (spread, largest, slope):
        axes.set_xscale("log", base=2)
        axes.set_xticks(WIDTHS, [str(width) for width in WIDTHS])
        axes.legend(frameon=False)
    spread.set_yscale("log")
    largest.set_ylim(0, 1.05)
    slope.set_ylim(bottom=0)
    label_axes(spread, title="Variance of the scores", x="width d", y="variance (log)")
    label_axes(largest, title=f"Weight of the best of {N_KEYS} keys", x="width d", y="largest weight")
    label_axes(slope, title="What the softmax lets through to learn from", x="width d", y="norm of ∂weights/∂scores")
    figure.suptitle("Why √d: without it wide vectors make the softmax hard, and its gradient vanishes")
    return figure
