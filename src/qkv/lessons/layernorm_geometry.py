"""Lesson: LayerNorm maps all keys to a sphere in a hyperplane, where every key can be selected."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.inspection import new_figure
from qkv.lessons import majority
from qkv.lessons.console import print_section, print_table, print_text
from qkv.lessons.figure_style import BLUE, ORANGE, RED, DrawFigure, Figure
from qkv.lessons.selectable_keys import find_selectable_keys
from qkv.nn import AttentionInputs
from qkv.nn.norm import LayerNorm

N, D = 40, 64
Vectors = Float[Tensor, "key d"]


def apply_layer_norm(keys: Vectors) -> Vectors:
    """Apply LayerNorm with its initial parameters (γ = 1, β = 0)."""
    with torch.no_grad():
        return LayerNorm(keys.shape[1], eps=1e-12).to(keys.dtype)(keys[None])[0]


def compute_weights(query: Float[Tensor, " d"], keys: Vectors) -> Float[Tensor, " key"]:
    rows = keys[None, None]
    return AttentionInputs(queries=query[None, None, None], keys=rows, values=rows, scale=len(query) ** -0.5).weights()[
        0, 0, 0
    ]


def lesson(seed: int) -> DrawFigure:
    raw = torch.randn(N, D, dtype=torch.float64) * (0.5 + torch.rand(N, 1)) + 0.3
    print_section(f"LayerNorm maps {N} keys (d = {D}) to a hyperplane and gives them the same norm")
    print_table(
        ["", "k·1 (smallest … largest)", "‖k‖ (smallest … largest)"],
        [
            (name, _format_range(keys.sum(1)), _format_range(keys.norm(dim=1)))
            for name, keys in (("without LayerNorm", raw), ("with LayerNorm", apply_layer_norm(raw)))
        ],
    )
    print_text(f"""The vectors k with k·1 = 0 form the hyperplane through the origin that is orthogonal to 1 =
        [1, 1, …, 1]. After LayerNorm, all keys are in this hyperplane and have the norm ‖k‖ = √d = {D**0.5:.3f}.""")

    print_section("After LayerNorm, a query in the direction of 1 attends to all keys equally")
    ones, noise = torch.ones(D, dtype=torch.float64), torch.randn(D, dtype=torch.float64)
    print_table(
        ["query", "without: largest weight", "smallest", "with LayerNorm: largest weight", "smallest"],
        [
            (
                name,
                *(
                    f(compute_weights(q, keys)).item()
                    for keys in (raw, apply_layer_norm(raw))
                    for f in (torch.max, torch.min)
                ),
            )
            for name, q in (("1", ones), ("1 + 0.1·noise", ones + 0.1 * noise), ("noise", noise))
        ],
    )
    print_text(f"""Uniform weights would be 1/n = {1 / N:.4f}. With LayerNorm, the query 1 assigns the same weight to
        every key, for any set of keys. Without LayerNorm, no query except 0 has this property.""")

    print_section("Number of keys that no query can select, among 100 random keys")
    rows = []
    for d in (3, 4, 6, 8):
        keys = torch.randn(100, d, dtype=torch.float64)
        rows.append((d, *(int((~find_selectable_keys(v)).sum()) for v in (keys, apply_layer_norm(keys)))))
    print_table(["d", "without LayerNorm", "with LayerNorm"], rows)
    print_text("""A query selects the key with the highest score. A key inside the convex hull of the other keys does
        not have the highest score for any query. On the sphere, no key is inside the convex hull of the others, and
        every key can be selected: a query that is equal to a key has its highest score with this key.""")
    print_text("""In this lesson, the keys are the outputs of LayerNorm. An invertible W_K transforms the hyperplane
        linearly and does not change these results.""")
    _print_trained_query_cosines_with_ones(seed)
    in_space = torch.randn(N, 3, dtype=torch.float64)
    return lambda: _draw_selectable_keys(in_space, apply_layer_norm(in_space))


def _print_trained_query_cosines_with_ones(seed: int) -> None:
    print_section("Do queries learn to point in the direction of 1? A head predicts the most frequent token")
    rows = []
    for name, has_layer_norm in (("without LayerNorm", False), ("with LayerNorm", True)):
        model, accuracy = majority.train_majority_classifier(layer_norm=has_layer_norm, seed=seed)
        rows.append((name, model.input_space_query_cosine_with_ones(), accuracy))
    print_table(
        ["", "|cosine(query, 1)|", "accuracy"],
        [*rows, ("chance", majority.random_cosine_with_ones(seed), 1 / majority.N_CLASSES)],
        digits=3,
    )
    print_text("""Lecture E states that queries are close to the vector 1. In this small experiment with LayerNorm, the
        queries only move toward the direction of 1. Exact alignment is not necessary because a query with a small norm
        attends to all keys almost equally, regardless of its direction.""")


def _format_range(values: Float[Tensor, " key"]) -> str:
    low, high = (end.round(decimals=9).item() + 0.0 for end in values.aminmax())
    return f"{low:8.3f} … {high:.3f}"


def _draw_selectable_keys(raw: Vectors, with_layernorm: Vectors) -> Figure:
    figure = new_figure(width=11.0, height=5.2)
    for i, (keys, name) in enumerate(((raw, "without LayerNorm"), (with_layernorm, "with LayerNorm"))):
        axes: Any = figure.add_subplot(1, 2, i + 1, projection="3d")
        is_selectable = find_selectable_keys(keys)
        axes.scatter(
            *keys[is_selectable].T.numpy(),
            color=BLUE,
            s=24,
            label=f"{int(is_selectable.sum())} selectable keys",
            depthshade=False,
        )
        if not is_selectable.all():
            unselectable = keys[~is_selectable]
            axes.scatter(
                *unselectable.T.numpy(),
                color=RED,
                s=30,
                marker="x",
                label=f"{len(unselectable)} unselectable keys",
                depthshade=False,
            )
        axes.quiver(
            0,
            0,
            0,
            *[1.8] * 3,
            color=ORANGE,
            linewidth=2.5,
            arrow_length_ratio=0.12,
            label="direction of 1 = [1, 1, 1]",
        )
        axes.set(title=name, xlabel="x", ylabel="y", zlabel="z")
        axes.set(xticks=[-2, 0, 2], yticks=[-2, 0, 2], zticks=[-2, 0, 2])
        axes.view_init(elev=12, azim=5)
        axes.legend(loc="upper left", fontsize="small")
    figure.suptitle(f"LayerNorm maps {len(raw)} keys (d = 3) to a circle around 1, where every key can be selected")
    return figure
