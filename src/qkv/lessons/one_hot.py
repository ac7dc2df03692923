"""Why is an embedding both a matrix product and a look-up in a table?"""

import torch
from torch import Tensor
from torch.nn import functional as F

from qkv.inspection import new_figure
from qkv.lessons.console import format_shape, print_matrix, print_section, print_table, print_text
from qkv.lessons.figure_style import DrawFigure, Figure, label_axes
from qkv.lessons.timer import best_of_n_seconds
from qkv.nn import TokenEmbedding

THANKS = {"thanks": 5, "for": 4000, "all": 10532, "the": 2224}
VOCABULARY_SIZE = 16_000
D_MODEL = 8
A_TOKEN = 7


@torch.no_grad()
def lesson(seed: int) -> DrawFigure:  # noqa: ARG001 - torch's chance has started at the seed
    small = _columns()
    _rows()
    return lambda: _draw(small)


def _columns() -> TokenEmbedding:
    print_section("Lecture A: 25 tokens, W is 10×25, Y = W·X picks a column")
    embedding = TokenEmbedding(25, 10)
    columns = embedding.weight.T
    one_hot = F.one_hot(torch.tensor(A_TOKEN), 25).float()
    picked = columns @ one_hot
    looked_up = embedding(torch.tensor([[A_TOKEN]]))[0, 0]
    print_table(
        ["", "shape", f"first five numbers, token {A_TOKEN}"],
        [
            ("X, one-hot", "25×1", f"a single 1, at place {int(one_hot.argmax())}"),
            ("W·X", "10×1", _numbers(picked)),
            (f"column {A_TOKEN} of W", "10×1", _numbers(columns[:, A_TOKEN])),
            ("look-up", "10", _numbers(looked_up)),
        ],
    )
    every = torch.stack([columns @ row for row in torch.eye(25)])
    same = torch.equal(every, embedding(torch.arange(25)[None])[0])
    print_text(f"""All 25 tokens, product against look-up: equal to the last bit: {same}. So the input can be the ids
        themselves, and W a table. A counts ids from 1 to 25; here, as in all code, from 0 to 24.""")
    return embedding


def _rows() -> None:
    print_section("Lecture D: “thanks for all the” = [5, 4000, 10532, 2224], E is |V|×d, x·E picks a row")
    embedding = TokenEmbedding(VOCABULARY_SIZE, D_MODEL)
    ids = torch.tensor([list(THANKS.values())])
    one_hots = F.one_hot(ids[0], VOCABULARY_SIZE).float()
    product = one_hots @ embedding.weight
    looked_up = embedding(ids)[0]
    print_text(f"""N = {len(THANKS)} one-hots at once: (N×|V|)·(|V|×d) = {format_shape(one_hots)} · {format_shape(embedding.weight)} =
        {format_shape(product)}.""")
    names = [f"row {i} ({word})" for word, i in THANKS.items()]
    print_matrix(product, rows=names, columns=[f"[{j}]" for j in range(D_MODEL)])
    print_text(f"Product against look-up: equal to the last bit: {torch.equal(product, looked_up)}.")
    print_text("""The slide numbers the places of a one-hot from 1, so its row 5 is the fifth. A tokenizer's ids start at 0:
        row 5 is then the sixth.""")

    print_section(f"The same answer, not the same work (|V| = {VOCABULARY_SIZE:,}, d = {D_MODEL})")
    by_product = 1e6 * best_of_n_seconds(lambda: one_hots @ embedding.weight)
    by_look_up = 1e6 * best_of_n_seconds(lambda: embedding(ids))
    print_table(
        ["", "multiplications and additions", "numbers read", "microseconds here"],
        [
            ("product", 2 * one_hots.numel() * D_MODEL, one_hots.numel() + embedding.weight.numel(), by_product),
            ("look-up", 0, ids.numel() + looked_up.numel(), by_look_up),
        ],
        digits=0,
    )


def _numbers(vector: Tensor) -> str:
    return " ".join(f"{number:6.2f}" for number in vector[:5].tolist())


def _draw(embedding: TokenEmbedding) -> Figure:
    """A's layout: the 1 of a one-hot stands above the column of W that it picks."""
    ids = torch.tensor([3, 17, A_TOKEN, 20])
    columns = embedding.weight.detach().T
    figure = new_figure(width=10.0, height=5.2)
    grid = figure.subplots(2, 2, sharex="col", sharey="row", width_ratios=[25, 6], height_ratios=[4, 10])
    (hot, corner), (table_of_all, picked) = grid
    hot.imshow(F.one_hot(ids, 25).numpy(), cmap="Greys", vmin=0, vmax=1, aspect="auto")
    corner.axis("off")
    limit = columns.abs().max().item()
    image = table_of_all.imshow(columns.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
    picked.imshow(columns[:, ids].numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
    figure.colorbar(image, ax=grid, fraction=0.03)
    hot.set_yticks(range(4), [f"id {i}" for i in ids.tolist()])
    table_of_all.set_xticks(range(25))
    picked.set_xticks(range(4), [f"id {i}" for i in ids.tolist()])
    label_axes(hot, title="four one-hots, a row each: black is 1", x="", y="")
    label_axes(table_of_all, title="W, 10×25", x="token", y="width")
    label_axes(picked, title="W·X: the columns picked", x="", y="")
    figure.suptitle("A one-hot picks a column of W: a product that is a look-up")
    return figure
