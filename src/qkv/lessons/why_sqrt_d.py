"""Lesson: why attention scores are divided by √d before the softmax."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.inspection import new_figure
from qkv.lessons.console import print_section, print_table, print_text
from qkv.lessons.figure_style import BLUE, RED, DrawFigure, Figure, style_and_label_axes
from qkv.nn import AttentionInputs
from qkv.nn.attention import masked_softmax

WIDTHS = (4, 16, 64, 256, 1024, 4096)
N_QUERIES, N_KEYS = 256, 16
LECTURE_B_SCORES = (112.0, 96.0, 16.0, 8.0)
LECTURE_B_WIDTH = 64


@dataclass(frozen=True)
class ScoreStatistics:
    """Statistics of the attention between random queries and keys, for one width and one scale."""

    score_variance: float
    mean_largest_weight: float
    """Largest attention weight of a query, averaged over all queries."""
    mean_softmax_jacobian_norm: float
    """Norm of ∂weights/∂scores, averaged over all queries."""


def lesson(seed: int) -> DrawFigure:  # noqa: ARG001 - `run` has already seeded torch
    unscaled = {width: _measure_random_scores(width, scale=1.0) for width in WIDTHS}
    scaled = {width: _measure_random_scores(width, scale=width**-0.5) for width in WIDTHS}

    print_section(f"Scores of random vectors: {N_QUERIES} queries and {N_KEYS} keys from N(0, 1)")
    print_text(
        "A dot product is a sum of d products that each have variance 1. The dot product therefore has variance d and "
        "standard deviation √d."
    )
    print_table(
        ["d", "var(q·k)", "var(q·k/√d)", "largest weight", "with √d", "∂softmax", "with √d"],
        [
            (
                width,
                unscaled[width].score_variance,
                scaled[width].score_variance,
                unscaled[width].mean_largest_weight,
                scaled[width].mean_largest_weight,
                unscaled[width].mean_softmax_jacobian_norm,
                scaled[width].mean_softmax_jacobian_norm,
            )
            for width in WIDTHS
        ],
    )  # fmt: skip
    print_text(f"""Without scaling, the largest weight approaches 1 as d increases, and the derivative of the softmax
        becomes too small for learning. If the scores are divided by √d, these quantities hardly depend on d. For
        comparison, uniform weights would be 1/{N_KEYS} = {1 / N_KEYS}.""")
    _print_lecture_b_scaling()
    return lambda: _draw_statistics(unscaled, scaled)


def _measure_random_scores(width: int, *, scale: float) -> ScoreStatistics:
    queries, keys = torch.randn(1, 1, N_QUERIES, width), torch.randn(1, 1, N_KEYS, width)
    inputs = AttentionInputs(queries=queries, keys=keys, values=keys, scale=scale)
    scores = inputs.scores()
    weights = inputs.weights()
    return ScoreStatistics(
        score_variance=scores.var().item(),
        mean_largest_weight=weights.amax(-1).mean().item(),
        mean_softmax_jacobian_norm=_softmax_jacobian(scores[0, 0]).norm(dim=(1, 2)).mean().item(),
    )


def _softmax_jacobian(scores: Float[Tensor, "query key"]) -> Float[Tensor, "query key key"]:
    """Compute ∂weights/∂scores for each query, using autograd."""
    scores = scores.clone().requires_grad_()
    weights = masked_softmax(scores[None, None])[0, 0]
    rows = [torch.autograd.grad(weights[:, key].sum(), scores, retain_graph=True)[0] for key in range(scores.shape[1])]
    return torch.stack(rows, dim=1)


def _print_lecture_b_scaling() -> None:
    print_section("The scores of lecture B, with and without scaling")
    scores = torch.tensor(LECTURE_B_SCORES, dtype=torch.float64)
    rows: list[list[str]] = []
    for name, scale in (("q·k", 1.0), ("q·k/√64", LECTURE_B_WIDTH**-0.5)):
        scaled = scores * scale
        weights = masked_softmax(scaled[None, None, None])[0, 0, 0]
        derivative = _softmax_jacobian(scaled[None])[0, 0, 0].item()
        rows.append([f"scores {name}", *(f"{score:g}" for score in scaled.tolist()), ""])
        rows.append(["  weights", *(_format_weight(weight) for weight in weights.tolist()), f"{derivative:.2e}"])
    print_table(["", "token 1", "token 2", "token 3", "token 4", "∂a₁/∂s₁"], rows)
    print_text("""Without scaling, token 1 receives almost all of the weight, although its score of 112 is not much
        higher than the score of token 2, which is 96. The derivative is almost zero.""")


def _format_weight(weight: float) -> str:
    return f"{weight:.7f}" if weight > 1e-4 else f"{weight:.1e}"


def _draw_statistics(unscaled: dict[int, ScoreStatistics], scaled: dict[int, ScoreStatistics]) -> Figure:
    figure = new_figure(width=12.0, height=4.0)
    variance, largest, jacobian = figure.subplots(1, 3)
    for statistics, color, name, marker in ((unscaled, RED, "q·k", "o"), (scaled, BLUE, "q·k/√d", "s")):
        rows = statistics.values()
        style = {"color": color, "marker": marker, "label": name}
        variance.plot(WIDTHS, [row.score_variance for row in rows], **style)
        largest.plot(WIDTHS, [row.mean_largest_weight for row in rows], **style)
        jacobian.plot(WIDTHS, [row.mean_softmax_jacobian_norm for row in rows], **style)
    for axes in (variance, largest, jacobian):
        axes.set_xscale("log", base=2)
        axes.set_xticks(WIDTHS, [str(width) for width in WIDTHS])
        axes.legend(frameon=False)
    variance.set_yscale("log")
    largest.set_ylim(0, 1.05)
    jacobian.set_ylim(bottom=0)
    style_and_label_axes(variance, title="Variance of the scores", x="width d", y="variance (log)")
    style_and_label_axes(largest, title=f"Largest weight among {N_KEYS} keys", x="width d", y="largest weight")
    style_and_label_axes(jacobian, title="Gradient through the softmax", x="width d", y="norm of ∂weights/∂scores")
    figure.suptitle("Without division by √d, wide vectors saturate the softmax, and its gradient vanishes")
    return figure
