"""Lesson: an attention computation, shown number by number."""

import torch
from torch import Tensor

from qkv.inspection import new_figure, record
from qkv.lessons.console import (
    max_abs_difference,
    print_matrix,
    print_section,
    print_slide_error,
    print_table,
    print_text,
)
from qkv.lessons.figure_style import BLUE, GREEN, ORANGE, SKY, DrawFigure, Figure, style_and_label_axes
from qkv.nn import Attention, HeadConfig

D_KEY, D_VALUE = 64, 4
LECTURE_B_SLIDE_SCORES = (112.0, 96.0, 16.0, 8.0)
LECTURE_B_SLIDE_WEIGHTS = (0.87, 0.12, 0.01, 0.0)
INPUTS = torch.tensor([[1.0, 0, 0, 1], [0, 1, 0, 1], [0, 0, 1, 1], [0, 0, 0, 1]])
SUBSCRIPTS = "₁₂₃₄"
COLUMNS = ("[0]", "[1]", "[2]", "[3]")


def lesson(seed: int) -> DrawFigure:  # noqa: ARG001 - `run` has already seeded torch
    target_scores = torch.cat((torch.tensor([LECTURE_B_SLIDE_SCORES]), 8.0 * torch.randint(0, 15, (3, 4))))
    attention = _build_head_from_unscaled_scores(target_scores)
    with torch.no_grad(), record(attention, "queries", "keys", "values", "weights") as cache:
        output = attention(INPUTS[None])[0]
    queries, keys, values = (cache[name][0, 0] for name in ("queries", "keys", "values"))

    print_section("1. Each input has a query, a key and a value: q = W_q·x, k = W_k·x, v = W_v·x")
    print_text(f"""The slide shows only the scores, not the vectors. This lesson constructs W_q and W_k so that
        q₁·k₁ … q₁·k₄ are exactly the scores on the slide. The queries and keys have width {D_KEY}, so the scores are
        divided by √{D_KEY} = {D_KEY**0.5:g}, as on the slide. The values and queries 2 to 4 are random.""")
    print_table(
        ["", "x", f"first 4 of q's {D_KEY}", f"first 4 of k's {D_KEY}", "v"],
        [(f"{i + 1}", *(_format_first_four(part[i]) for part in (INPUTS, queries, keys, values))) for i in range(4)],
    )
    scores = queries @ keys.T
    weights = cache["weights"][0, 0]
    _print_exact_and_slide_weights(scores[0], weights[0])
    _print_weighted_sum(weights[0], values, output[0])

    print_section("5. The same computation for x₂, x₃ and x₄")
    names = [f"token {i + 1}" for i in range(4)]
    print_matrix(scores, rows=[f"q{i}" for i in SUBSCRIPTS], columns=names, corner="score", digits=0)
    print_matrix(weights, rows=[f"q{i}" for i in SUBSCRIPTS], columns=names, corner="weight", digits=4)
    print_matrix(output, rows=[f"z{i}" for i in SUBSCRIPTS], columns=list(COLUMNS), corner="Σ a·v", digits=4)
    expected = torch.softmax(scores / D_KEY**0.5, dim=-1) @ values
    print_text(f"""The results of the manual computation and of `Attention` differ by at most
        {max_abs_difference(expected, output)}.""")
    return lambda: _draw_walkthrough(weights)


def _build_head_from_unscaled_scores(scores: Tensor) -> Attention:
    """Build an attention head whose unscaled scores for `INPUTS` are exactly the given scores.

    The head has no biases and no W_O.
    """
    keys = torch.ones(1, 1)
    while len(keys) < D_KEY:
        # Sylvester's construction gives orthogonal rows of ±1, so that k·k = 64 and kᵢ·kⱼ = 0.
        keys = torch.cat((torch.cat((keys, keys), 1), torch.cat((keys, -keys), 1)))
    keys = keys[1:5]
    queries = scores @ keys / D_KEY
    values = torch.randint(-5, 6, (4, D_VALUE)).float()
    heads = HeadConfig(n_heads=1, n_kv_heads=1, d_head=D_KEY, d_value=D_VALUE)
    attention = Attention(INPUTS.shape[1], heads, bias=False, output_projection=False)
    inverse_inputs = torch.linalg.inv(INPUTS)
    for linear, result in ((attention.q_proj, queries), (attention.k_proj, keys), (attention.v_proj, values)):
        linear.weight.data = (inverse_inputs @ result).T.contiguous()
    return attention


def _print_exact_and_slide_weights(scores: Tensor, weights: Tensor) -> None:
    print_section("2 and 3. Dividing the scores of x₁ by √64 and applying the softmax")
    exact, slide = weights.tolist(), LECTURE_B_SLIDE_WEIGHTS
    print_table(
        ["token", "q₁·k", "÷ 8", "e^(s/8)", "weight", "exact weight", "slide", "error"],
        [
            (
                f"{i + 1}",
                f"{s:g}",
                f"{s / 8:g}",
                f"{torch.tensor(s / 8).exp().item():,.1f}",
                exact[i],
                f"{exact[i]:.2e}",
                slide[i],
                slide[i] - exact[i],
            )
            for i, s in enumerate(scores.tolist())
        ],
    )
    print_slide_error(f"""The weights on the slide are .87, .12, .01 and 0. The exact weights are {exact[0]:.4f},
        {exact[1]:.4f}, {exact[2]:.0e} and {exact[3]:.0e}. The exact weight of token 3 is
        {slide[2] / exact[2]:,.0f} times smaller than .01, and the exact weight of token 1 rounds to
        {exact[0]:.2f}.""")


def _print_weighted_sum(weights: Tensor, values: Tensor, z: Tensor) -> None:
    print_section("4. z₁ = a₁·v₁ + a₂·v₂ + a₃·v₃ + a₄·v₄")
    parts = weights[:, None] * values
    slide_result = torch.tensor(LECTURE_B_SLIDE_WEIGHTS) @ values
    labels = [*(f"a{i}·v{i}" for i in SUBSCRIPTS), "z₁ (sum)", "z₁ (Attention)", "z₁ (slide's weights)"]
    print_matrix(
        torch.cat((parts, torch.stack((parts.sum(0), z, slide_result)))), rows=labels, columns=list(COLUMNS), digits=4
    )


def _format_first_four(vector: Tensor) -> str:
    return " ".join(f"{number:g}" for number in vector[:4].tolist())


def _format_bar_label(weight: float) -> str:
    return f"{weight:.2f}" if weight > 1e-3 else f"{weight:.0e}" if weight else "0"


def _draw_walkthrough(weights: Tensor) -> Figure:
    figure = new_figure(width=10.0, height=4.0)
    first, all_four = figure.subplots(1, 2)
    tokens = [f"x{i}" for i in SUBSCRIPTS]
    series = (("exact", BLUE, -0.2, weights[0].tolist()), ("slide", ORANGE, 0.2, LECTURE_B_SLIDE_WEIGHTS))
    for name, color, shift, heights in series:
        bars = first.bar([i + shift for i in range(4)], heights, width=0.4, color=color, label=name)
        first.bar_label(bars, labels=[_format_bar_label(height) for height in heights], fontsize="small")
    first.set_yscale("log")
    first.set_ylim(1e-6, 4)
    first.set_xticks(range(4), tokens)
    first.legend(frameon=False)
    style_and_label_axes(first, title="Weights of x₁, exact and on the slide", x="token", y="weight (log)")
    bottom = torch.zeros(4)
    for i, color in enumerate((BLUE, ORANGE, GREEN, SKY)):
        all_four.bar(tokens, weights[:, i].tolist(), bottom=bottom.tolist(), color=color, label=f"v{SUBSCRIPTS[i]}")
        bottom = bottom + weights[:, i]
    all_four.set_ylim(0, 1.05)
    all_four.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    style_and_label_axes(all_four, title="Weights of the values in z₁ … z₄", x="query", y="weight")
    figure.suptitle("One attention computation: softmax(q·k/√64)·v")
    return figure
