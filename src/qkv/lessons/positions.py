"""Lesson: position encodings (learned, sinusoidal, concatenated, rotary, ALiBi)."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.choices import SinusoidStyle
from qkv.inspection import new_figure
from qkv.lessons.console import print_matrix, print_section, print_slide_error, print_table, print_text
from qkv.lessons.figure_style import BLUE, GREEN, ORANGE, PINK, RED, SKY, DrawFigure, Figure, style_and_label_axes
from qkv.nn.positions import (
    ALiBi,
    ConcatenatedSinusoidalPositions,
    LearnedPositions,
    RotaryEmbedding,
    SinusoidalPositions,
    sinusoidal_encoding,
)
from qkv.tensors import Positions

B, E = SinusoidStyle.INTERLEAVED, SinusoidStyle.INTERLEAVED_FROM_ONE
N, D, N_WORDS = 100, 64, 60
SPREADS = (0.1, 0.5, 1.0, 2.0)


def lesson(seed: int) -> DrawFigure:  # noqa: ARG001 - `run` has already seeded torch
    positions = torch.arange(N)[None]
    b, e = (sinusoidal_encoding(positions, D, style)[0] for style in (B, E))
    print_section("Learned positions: a table with one row per position (lecture D)")
    shape = LearnedPositions(N, D).table.weight.shape
    print_slide_error(f"""According to lecture D, the table E_pos has shape [1 × N]. The correct shape is [N × d]. In
        this lesson, the shape is {list(shape)}, and the table contains {shape.numel():,} numbers.""")
    _print_lecture_b_and_e_sinusoids()
    print_section(f"All rows are different ({N} positions, d = {D})")
    print_table(
        ["", "smallest distance", "mean distance of adjacent rows", "largest distance"],
        [
            (
                name,
                torch.pdist(rows).min().item(),
                (rows[1:] - rows[:-1]).norm(dim=1).mean().item(),
                torch.pdist(rows).max().item(),
            )
            for name, rows in (("B", b), ("E", e))
        ],
    )
    _print_concatenation_equals_addition(positions)
    clouds = {spread: b[:6, None] + torch.randn(N_WORDS, D) * spread for spread in SPREADS}
    print_section("Words form clusters around positions (lecture E)")
    print_table(
        ["std of words", "‖word‖", "nearest other position", "words nearest to their position"],
        [
            (
                spread,
                spread * D**0.5,
                torch.pdist(b[:6]).min().item(),
                f"{_nearest_position_accuracy(points, b[:6]):.0%}",
            )
            for spread, points in clouds.items()
        ],
        digits=2,
    )
    _print_rotary_scores_and_alibi_biases()
    return lambda: _draw_sinusoids_and_clusters(b, e, clouds[0.5])


def _print_lecture_b_and_e_sinusoids() -> None:
    d = 8
    b, e = (sinusoidal_encoding(torch.arange(4)[None], d, style)[0] for style in (B, E))
    print_section(f"Sinusoids: alternating sin and cos of pos / 10000^(2i/d), d = {d}")
    print_text(
        "Lecture B numbers the (sin, cos) pairs from i = 0 to d/2 − 1. Lecture E numbers them from i = 1 to d/2."
    )
    columns = [f"{name}{i}" for i in range(d // 2) for name in ("sin", "cos")]
    print_matrix(b, rows=[f"B, pos {i}" for i in range(4)], columns=columns, digits=3)
    print_matrix(
        e, rows=[f"E, pos {i}" for i in range(4)], columns=[c[:3] + str(int(c[3]) + 1) for c in columns], digits=3
    )
    shortest_period, longest_period = (2 * math.pi * 10000**exponent for exponent in (0.0, 1.0))
    print_slide_error(f"""Lectures B and E use different indices; the 2017 paper agrees with lecture B. The columns of E
        are the columns of B shifted by two (max|difference| = {(e[:, :-2] - b[:, 2:]).abs().max().item():.1g}). E lacks
        the shortest period ({shortest_period:.1f} positions), and B lacks the longest period ({longest_period:,.0f}
        positions). Both encodings work, but they cannot be mixed (max|B − E| = {(b - e).abs().max().item():.2f}).""")


def _print_concatenation_equals_addition(positions: Positions) -> None:
    print_section("Combining tokens and positions: addition, or concatenation and projection")
    added, concatenated = SinusoidalPositions(), ConcatenatedSinusoidalPositions(D)
    with torch.no_grad():
        concatenated.project.weight.copy_(torch.cat((torch.eye(D), torch.eye(D)), dim=1))
        tokens = torch.randn(1, N, D)
        difference = (added(tokens, positions) - concatenated(tokens, positions)).abs().max().item()
    print_table(
        ["", "formula", "parameters"],
        [
            ("sinusoid, added", "x + p", _parameter_count(added)),
            ("learned, added", "x + P[pos]", _parameter_count(LearnedPositions(N, D))),
            ("sinusoid, concatenated", "[x; p]·W, W of 2d×d", _parameter_count(concatenated)),
        ],
    )
    print_text(f"""Concatenation is more general than addition: with W = [I; I], both give the same result
        (max|difference| = {difference:.1g}). Concatenation needs 2d² = {2 * D * D:,} additional parameters.""")


def _print_rotary_scores_and_alibi_biases() -> None:
    print_section("Newer methods: position information in the attention scores")
    rotary = RotaryEmbedding(D)
    query, key = torch.randn(2, 1, 1, 1, D)

    def score(query_position: int, key_position: int) -> float:
        info = [rotary(torch.tensor([[p]]), torch.tensor([[p]])) for p in (query_position, key_position)]
        return (info[0].rotate(query) * info[1].rotate(key)).sum().item()

    print_table(
        ["rotary position embedding", "q·k"],
        [(f"query at {q}, key at {k}: distance {q - k}", score(q, k)) for q, k in ((5, 2), (105, 102), (5, 4))],
    )
    bias = ALiBi(8)(torch.tensor([[10]]), torch.arange(11)[None]).bias
    assert bias is not None
    print_text(f"""For given vectors q and k, rotary scores depend only on the distance between the query and the key.
        ALiBi adds −slope × distance to each score. For a key 10 positions before the query, the first of 8 heads adds
        {bias[0, 0, 0, 0].item():.1f}, and the last head adds {bias[0, -1, 0, 0].item():.3f}.""")


def _nearest_position_accuracy(
    points: Float[Tensor, "position word d"], positions: Float[Tensor, "position d"]
) -> float:
    nearest = torch.cdist(points, positions.expand(len(positions), -1, -1)).argmin(-1)
    return (nearest == torch.arange(len(positions))[:, None]).float().mean().item()


def _parameter_count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _draw_sinusoids_and_clusters(lecture_b: Tensor, lecture_e: Tensor, noisy_words: Tensor) -> Figure:
    figure = new_figure(width=14.0, height=4.4)
    b_axes, e_axes, cluster_axes = figure.subplots(1, 3)
    for axes, rows, title in ((b_axes, lecture_b, "B: i from 0"), (e_axes, lecture_e, "E: i from 1")):
        image = axes.imshow(rows.numpy(), cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
        axes.set(title=f"Sinusoids, {title}", xlabel="dimension", ylabel="position")
    figure.colorbar(image, ax=[b_axes, e_axes], fraction=0.03)
    flat = noisy_words.flatten(0, 1)
    axis = torch.linalg.svd(flat - flat.mean(0), full_matrices=False).Vh[:2].T
    for i, color in enumerate((BLUE, ORANGE, GREEN, PINK, SKY, RED)):
        points, center = (noisy_words[i] - flat.mean(0)) @ axis, (lecture_b[i] - flat.mean(0)) @ axis
        cluster_axes.scatter(*points.T.numpy(), s=9, color=color, alpha=0.6)
        cluster_axes.text(
            *center,
            str(i),
            weight="bold",
            ha="center",
            va="center",
            bbox={"boxstyle": "circle", "facecolor": "white", "edgecolor": color},
        )
    style_and_label_axes(
        cluster_axes,
        title=f"{N_WORDS} words at each of the positions 0–5",
        x="first principal component",
        y="second principal component",
    )
    figure.suptitle("Position encodings: all rows are different, and words form clusters around them")
    return figure
