"""What does LayerNorm do to keys, and what can a query then do that it could not before?"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.inspection import new_figure
from qkv.lessons import majority
from qkv.lessons.console import print_section, print_table, print_text
from qkv.lessons.figure_style import BLUE, ORANGE, RED, DrawFigure, Figure
from qkv.lessons.selectable_keys import selectable
from qkv.nn import AttentionInputs, LayerNorm

N, D = 40, 64
Vectors = Float[Tensor, "key d"]


def normed(keys: Vectors) -> Vectors:
    """LayerNorm as it starts (γ = 1, β = 0)."""
    with torch.no_grad():
        return LayerNorm(keys.shape[1], eps=1e-12).to(keys.dtype)(keys[None])[0]


def weights(query: Float[Tensor, " d"], keys: Vectors) -> Float[Tensor, " key"]:
    rows = keys[None, None]
    return AttentionInputs(queries=query[None, None, None], keys=rows, values=rows, scale=len(query) ** -0.5).weights()[
        0, 0, 0
    ]


def lesson(seed: int) -> DrawFigure:
    raw = torch.randn(N, D, dtype=torch.float64) * (0.5 + torch.rand(N, 1)) + 0.3
    print_section(f"{N} keys, d = {D}: LayerNorm puts them on one plane, at one distance")
    print_table(["", "k·1 (smallest … largest)", "‖k‖ (smallest … largest)"], [
        (name, _range(keys.sum(1)), _range(keys.norm(dim=1)))
        for name, keys in (("without", raw), ("with LayerNorm", normed(raw)))
    ])  # fmt: skip
    print_text(f"k·1 = 0: the plane through 0 orthogonal to 1 = [1, 1, … 1]. ‖k‖ = √d = {D**0.5:.3f}.")

    print_section("A query along 1 then attends to all keys equally")
    one, noise = torch.ones(D, dtype=torch.float64), torch.randn(D, dtype=torch.float64)
    print_table(["query", "without: largest weight", "smallest", "with LayerNorm: largest", "smallest"], [
        (name, *(f(weights(q, keys)).item() for keys in (raw, normed(raw)) for f in (torch.max, torch.min)))
        for name, q in (("1", one), ("1 + 0.1·noise", one + 0.1 * noise), ("noise", noise))
    ])  # fmt: skip
    print_text(f"1/n = {1 / N:.4f}. Without LayerNorm no such query is at hand; with it, 1 is one for any keys.")

    print_section("Keys that no query can select (100 random keys)")
    rows = []
    for d in (3, 4, 6, 8):
        keys = torch.randn(100, d, dtype=torch.float64)
        rows.append((d, *(int((~selectable(v)).sum()) for v in (keys, normed(keys)))))
    print_table(["d", "unselectable without", "with LayerNorm"], rows)
    print_text("""A key inside the hull of the others never gets the highest score, whatever the query. On the sphere no
        key lies inside: each is selected by itself. (A key here is LayerNorm's output; W_K turns and stretches
        the plane after it, which, while it can be undone, changes neither fact.)""")
    _learned(seed)
    in_space = torch.randn(N, 3, dtype=torch.float64)
    return lambda: _draw(in_space, normed(in_space))


def _learned(seed: int) -> None:
    print_section("Do queries learn to stand along 1? One head, trained to name the most frequent token")
    rows = []
    for name, is_normed in (("without", False), ("with LayerNorm", True)):
        counter, accuracy = majority.train(normed=is_normed, seed=seed)
        rows.append((name, counter.likeness(), accuracy))
    print_table(
        ["", "|cosine(query, 1)|", "accuracy"],
        [*rows, ("by chance", majority.by_chance(seed), 1 / majority.N_CLASSES)],
        digits=3,
    )
    print_text("""E says that queries come close to 1. In this small run they lean towards it with LayerNorm, not all the way:
        to see all keys alike a short query does as well.""")


def _range(values: Float[Tensor, " key"]) -> str:
    low, high = (end.round(decimals=9).item() + 0.0 for end in values.aminmax())
    return f"{low:8.3f} … {high:.3f}"


def _draw(raw: Vectors, on_plane: Vectors) -> Figure:
    figure = new_figure(width=11.0, height=5.2)
    for i, (keys, name) in enumerate(((raw, "without LayerNorm"), (on_plane, "with LayerNorm"))):
        axes: Any = figure.add_subplot(1, 2, i + 1, projection="3d")
        found = selectable(keys)
        axes.scatter(
            *keys[found].T.numpy(), color=BLUE, s=24, label=f"{int(found.sum())} selectable keys", depthshade=False
        )
        if not found.all():
            lost = keys[~found]
            axes.scatter(
                *lost.T.numpy(), color=RED, s=30, marker="x", label=f"{len(lost)} unselectable keys", depthshade=False
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
    figure.suptitle(f"{len(raw)} keys, d = 3: LayerNorm puts them on a circle around 1, where each can be selected")
    return figure
