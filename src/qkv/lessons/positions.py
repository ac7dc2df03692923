"""How does a token's vector say where the token stands?"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.choices import SinusoidStyle
from qkv.inspection import new_figure
from qkv.lessons.console import print_matrix, print_section, print_slide_error, print_table, print_text
from qkv.lessons.figure_style import BLUE, GREEN, ORANGE, PINK, RED, SKY, DrawFigure, Figure, label_axes
from qkv.nn import ALiBi, ConcatenatedPositions, LearnedPositions, Rotary, SinusoidalPositions, sinusoidal_encoding
from qkv.tensors import Positions

B, E = SinusoidStyle.INTERLEAVED, SinusoidStyle.INTERLEAVED_FROM_ONE
N, D, N_WORDS = 100, 64, 60
SPREADS = (0.1, 0.5, 1.0, 2.0)


def lesson(seed: int) -> DrawFigure:  # noqa: ARG001 - torch's chance has started at the seed
    places = torch.arange(N)[None]
    b, e = (sinusoidal_encoding(places, D, style)[0] for style in (B, E))
    print_section("Learned: a table like the words', one row a position (lecture D)")
    shape = LearnedPositions(N, D).table.weight.shape
    print_slide_error(
        f"D gives the table E_pos the shape [1 × N]. It is [N × d]: here {list(shape)}, {shape.numel():,} numbers."
    )
    _two_formulas()
    print_section(f"Any two rows differ ({N} positions, d = {D})")
    print_table(["", "nearest two rows", "neighbours", "farthest two rows"], [
        (name, torch.pdist(rows).min().item(), (rows[1:] - rows[:-1]).norm(dim=1).mean().item(),
         torch.pdist(rows).max().item()) for name, rows in (("B", b), ("E", e))
    ])  # fmt: skip
    _added_or_concatenated(places)
    clouds = {spread: b[:6, None] + torch.randn(N_WORDS, D) * spread for spread in SPREADS}
    print_section("Words make clouds around positions (lecture E)")
    print_table(["word's std", "‖word‖", "nearest other position", "points nearest to their own position"], [
        (spread, spread * D**0.5, torch.pdist(b[:6]).min().item(), f"{_found(points, b[:6]):.0%}")
        for spread, points in clouds.items()
    ], digits=2)  # fmt: skip
    _since_then()
    return lambda: _draw(b, e, clouds[0.5])


def _two_formulas() -> None:
    d = 8
    b, e = (sinusoidal_encoding(torch.arange(4)[None], d, style)[0] for style in (B, E))
    print_section(f"Sinusoids: sin and cos of pos / 10000^(2i/d), by turns, d = {d}")
    print_text("B counts the pairs i = 0, 1, … d/2 − 1; E counts i = 1, 2, … d/2.")
    columns = [f"{name}{i}" for i in range(d // 2) for name in ("sin", "cos")]
    print_matrix(b, rows=[f"B, pos {i}" for i in range(4)], columns=columns, digits=3)
    print_matrix(
        e, rows=[f"E, pos {i}" for i in range(4)], columns=[c[:3] + str(int(c[3]) + 1) for c in columns], digits=3
    )
    fast, slow = (2 * math.pi * 10000**share for share in (0.0, 1.0))
    print_slide_error(f"""B and E index differently; the 2017 paper is B. E's pair i stands where B has pair i − 1: E's columns
        equal B's two to the right (max|difference| {(e[:, :-2] - b[:, 2:]).abs().max().item():.1g}). E lacks the
        fastest turn (every {fast:.1f} positions), B the slowest (every {slow:,.0f}). Either works; mixed, they
        do not (max|B − E| {(b - e).abs().max().item():.2f}).""")


def _added_or_concatenated(places: Positions) -> None:
    print_section("Added, or concatenated and projected?")
    added, joined = SinusoidalPositions(), ConcatenatedPositions(D)
    with torch.no_grad():
        joined.project.weight.copy_(torch.cat((torch.eye(D), torch.eye(D)), dim=1))
        tokens = torch.randn(1, N, D)
        gap = (added(tokens, places) - joined(tokens, places)).abs().max().item()
    print_table(["", "formula", "parameters"], [
        ("sinusoid, added", "x + p", _size(added)),
        ("learned, added", "x + P[pos]", _size(LearnedPositions(N, D))),
        ("sinusoid, concatenated", "[x; p]·W, W of 2d×d", _size(joined)),
    ])  # fmt: skip
    print_text(f"""Concatenating is the more general: with W = [I; I] it is adding (max|difference| {gap:.1g}). It costs 2d²
        parameters more, here {2 * D * D:,}.""")


def _since_then() -> None:
    print_section("Since the lectures: positions in the scores")
    rotary = Rotary(D)
    query, key = torch.randn(2, 1, 1, 1, D)

    def score(of_query: int, of_key: int) -> float:
        turned = [rotary(torch.tensor([[at]]), torch.tensor([[at]])) for at in (of_query, of_key)]
        return (turned[0].rotate(query) * turned[1].rotate(key)).sum().item()

    print_table(["rotary: turns q and k; one pair's q·k at", "q·k"], [
        (f"query {q}, key {k}: distance {q - k}", score(q, k)) for q, k in ((5, 2), (105, 102), (5, 4))
    ])  # fmt: skip
    bias = ALiBi(8)(torch.tensor([[10]]), torch.arange(11)[None]).bias
    assert bias is not None
    print_text(f"""Rotary scores depend on the distance alone. ALiBi adds −slope × distance: of 8 heads the first gives
        {bias[0, 0, 0, 0].item():.1f} to a key 10 back, the last {bias[0, -1, 0, 0].item():.3f}.""")


def _found(points: Float[Tensor, "position word d"], positions: Float[Tensor, "position d"]) -> float:
    nearest = torch.cdist(points, positions.expand(len(positions), -1, -1)).argmin(-1)
    return (nearest == torch.arange(len(positions))[:, None]).float().mean().item()


def _size(part: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in part.parameters())


def _draw(b: Tensor, e: Tensor, cloud: Tensor) -> Figure:
    figure = new_figure(width=14.0, height=4.4)
    of_b, of_e, clouds = figure.subplots(1, 3)
    for axes, rows, title in ((of_b, b, "B: i from 0"), (of_e, e, "E: i from 1")):
        image = axes.imshow(rows.numpy(), cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
        axes.set(title=f"Sinusoids, {title}", xlabel="dimension", ylabel="position")
    figure.colorbar(image, ax=[of_b, of_e], fraction=0.03)
    flat = cloud.flatten(0, 1)
    axis = torch.linalg.svd(flat - flat.mean(0), full_matrices=False).Vh[:2].T
    for i, colour in enumerate((BLUE, ORANGE, GREEN, PINK, SKY, RED)):
        points, centre = (cloud[i] - flat.mean(0)) @ axis, (b[i] - flat.mean(0)) @ axis
        clouds.scatter(*points.T.numpy(), s=9, color=colour, alpha=0.6)
        clouds.text(*centre, str(i), weight="bold", ha="center", va="center",
                    bbox={"boxstyle": "circle", "facecolor": "white", "edgecolor": colour})  # fmt: skip
    label_axes(
        clouds, title=f"{N_WORDS} words at positions 0–5 (word + position)", x="first direction", y="second direction"
    )
    figure.suptitle("Positions: any two rows differ, and words make clouds around them")
    return figure
