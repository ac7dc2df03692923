"""Lesson: from raw scores to causal attention probabilities."""

from math import isnan, nan

import torch
from torch import Tensor

from qkv.inspection import Heatmap, plot_heatmaps
from qkv.lessons.console import print_matrix, print_section, print_slide_error, print_table, print_text
from qkv.lessons.figure_style import DrawFigure, Figure
from qkv.nn import CAUSAL, AttentionInputs
from qkv.nn.attention import masked_softmax

ILLEGIBLE = nan
LECTURE_E_SLIDE_SCORES = (
    (-0.08, 1.24, 0.69, -0.98, 1.43, -0.6, 0.7, 0.16, 0.93, 1.28, ILLEGIBLE, -1.1),
    (-0.09, -0.0, -0.7, 0.06, 0.25, 0.23, 0.26, 0.18, 0.78, -0.21, -1.01, 1.01),
    (0.86, 1.19, 1.59, 0.86, -0.13, -0.15, ILLEGIBLE, -0.98, -0.87, ILLEGIBLE, 1.87, -0.72),
    (0.12, -0.03, -0.02, 0.88, -0.46, -0.7, 0.54, -0.42, ILLEGIBLE, -0.38, 0.04, -0.84),
    (0.51, 0.17, 0.13, ILLEGIBLE, 0.24, -0.02, 1.68, -0.36, 0.64, 0.36, 0.27, 0.66),
    (0.24, ILLEGIBLE, 0.43, 0.74, 0.96, ILLEGIBLE, ILLEGIBLE, 0.31, 1.54, 1.66, 1.14, 0.58),
    (0.26, -0.1, 0.93, 0.72, -0.38, 1.65, 0.47, -0.96, -0.17, -0.9, ILLEGIBLE, 0.22),
    (-0.55, 0.81, 0.71, 1.7, -0.8, -1.14, -0.32, 1.78, -0.7, -0.04, 1.54, 0.81),
    (0.74, -0.76, -0.44, -0.08, ILLEGIBLE, -0.13, 1.25, ILLEGIBLE, 1.84, 0.3, 0.57, 0.74),
    (-0.97, -0.91, 0.15, 0.35, -0.81, 0.11, 1.14, ILLEGIBLE, 1.06, 1.87, 0.5, -0.3),
    (1.56, 0.9, 0.39, 1.46, 1.44, -1.05, 0.9, -0.73, 0.36, -0.67, -0.62, -0.43),
    (0.32, 0.74, 0.44, -0.1, 1.19, 0.83, 0.29, 2.06, 0.51, -0.26, 1.51, 0.11),
)
SLIDE_LAST_ROW = (0.05, 0.07, 0.05, 0.03, 0.11, 0.08, 0.05, ILLEGIBLE, 0.06, 0.03, ILLEGIBLE, 0.04)
"""Probabilities for query 11 on the slide. All scores of this query are legible on the slide."""
N = len(LECTURE_E_SLIDE_SCORES)
TOKENS = [str(i) for i in range(N)]


def lesson(seed: int) -> DrawFigure:  # noqa: ARG001 - `run` has already seeded torch
    slide = torch.tensor(LECTURE_E_SLIDE_SCORES)
    is_illegible = slide.isnan()
    scores = torch.where(is_illegible, torch.randn(N, N), slide)

    print_section(f"The raw scores of lecture E, {N} × {N}: one row per query, one column per key")
    rows = [["?" if isnan(number) else number for number in row] for row in slide.tolist()]
    print_table(["", *TOKENS], [[name, *row] for name, row in zip(TOKENS, rows, strict=True)], digits=2)
    print_text(f"""{int(is_illegible.sum())} of the {N * N} cells on the slide are illegible and shown as “?” here. The
        following computations use random numbers for these cells and the scores on the slide for all other cells.""")

    print_section("The mask: −∞ if the key is later than the query")
    visible = CAUSAL.to_dense(N, N, scores.device)[0, 0]
    masked = scores.masked_fill(~visible, float("-inf"))
    print_matrix(masked, rows=TOKENS, columns=TOKENS)
    print_slide_error("""Lecture E combines the scores and the mask with an “element-wise product”. Instead, −∞ must be
        added to the masked scores because a negative score times −∞ is +∞. See `qkv lesson wrong-masks`.""")

    print_section("The softmax of each row: attention probabilities")
    weights = masked_softmax(masked[None, None])[0, 0]
    print_matrix(weights, rows=TOKENS, columns=TOKENS)
    print_text(f"The row sums are between {weights.sum(-1).min().item():.4f} and {weights.sum(-1).max().item():.4f}.")
    print_text("Query 3 attends to keys " + ", ".join(str(key) for key in weights[3].nonzero()[:, 0].tolist()) + ".")
    _print_slide_comparison(weights[N - 1])
    _print_lecture_d_mask_scores_and_weights()
    return lambda: _draw_heatmaps(scores, masked, weights)


def _print_slide_comparison(last_query_weights: Tensor) -> None:
    print_section("The weights of query 11, which attends to all keys: computed and from the slide")
    print_table(
        ["key", *TOKENS],
        [["computed", *last_query_weights.tolist()], ["slide", *("?" if isnan(p) else p for p in SLIDE_LAST_ROW)]],
        digits=2,
    )


def _print_lecture_d_mask_scores_and_weights() -> None:
    print_section("The 5 × 5 mask of lecture D")
    visible = CAUSAL.to_dense(5, 5, torch.device("cpu"))[0, 0].tolist()
    numbers = range(1, 6)
    print_table(
        ["", *(f"k{key}" for key in numbers)],
        [
            [f"q{q}", *(f"q{q}·k{k}" if is_visible else "−∞" for k, is_visible in zip(numbers, row, strict=True))]
            for q, row in zip(numbers, visible, strict=True)
        ],
    )
    queries, keys = torch.randn(1, 1, 5, 8), torch.randn(1, 1, 5, 8)
    inputs = AttentionInputs(queries=queries, keys=keys, values=keys, scale=8**-0.5, mask=CAUSAL)
    print_text(
        "The following tables contain the scores q·k/√8 and their softmax for random vectors q and k of width 8."
    )
    names = [f"q{i}" for i in numbers]
    print_matrix(inputs.scores()[0, 0], rows=names, columns=[f"k{i}" for i in numbers])
    print_matrix(inputs.weights()[0, 0], rows=names, columns=[f"k{i}" for i in numbers])


def _draw_heatmaps(scores: Tensor, masked_scores: Tensor, weights: Tensor) -> Figure:
    return plot_heatmaps(
        Heatmap(matrix=scores, rows=TOKENS, columns=TOKENS, title="raw scores", is_signed=True),
        Heatmap(
            matrix=masked_scores, rows=TOKENS, columns=TOKENS, title="with the mask: −∞ for later keys", is_signed=True
        ),
        Heatmap(matrix=weights, rows=TOKENS, columns=TOKENS, title="softmax of each row: query 3 attends to keys 0–3"),
        title="Scores → mask → probabilities (lecture E)",
    )
