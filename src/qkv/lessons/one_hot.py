"""Lesson: multiplying by a one-hot vector gives the same embedding as a table lookup."""

import torch
from torch import Tensor
from torch.nn import functional as F

from qkv.inspection import new_figure
from qkv.lessons.console import format_shape, print_matrix, print_section, print_table, print_text
from qkv.lessons.figure_style import DrawFigure, Figure, style_and_label_axes
from qkv.lessons.timer import best_of_n_seconds
from qkv.nn import TokenEmbedding

THANKS = {"thanks": 5, "for": 4000, "all": 10532, "the": 2224}
LECTURE_D_VOCAB_SIZE = 16_000
EMBEDDING_WIDTH = 8
EXAMPLE_TOKEN_ID = 7


@torch.no_grad()
def lesson(seed: int) -> DrawFigure:  # noqa: ARG001 - `run` has already seeded torch
    small_embedding = _print_column_lookup()
    _print_one_hot_product_and_lookup()
    return lambda: _draw_one_hot_lookup(small_embedding)


def _print_column_lookup() -> TokenEmbedding:
    print_section("Lecture A: 25 tokens, W is 10×25, and Y = W·X selects a column")
    embedding = TokenEmbedding(25, 10)
    columns = embedding.weight.T
    one_hot = F.one_hot(torch.tensor(EXAMPLE_TOKEN_ID), 25).float()
    product = columns @ one_hot
    embedded = embedding(torch.tensor([[EXAMPLE_TOKEN_ID]]))[0, 0]
    print_table(
        ["", "shape", f"first five values, token {EXAMPLE_TOKEN_ID}"],
        [
            ("X, one-hot", "25×1", f"a single 1 at index {int(one_hot.argmax())}"),
            ("W·X", "10×1", _format_first_five(product)),
            (f"column {EXAMPLE_TOKEN_ID} of W", "10×1", _format_first_five(columns[:, EXAMPLE_TOKEN_ID])),
            ("lookup", "10", _format_first_five(embedded)),
        ],
    )
    all_products = torch.stack([columns @ row for row in torch.eye(25)])
    is_equal = torch.equal(all_products, embedding(torch.arange(25)[None])[0])
    print_text(f"""The product and the lookup are bit-identical for all 25 tokens: {is_equal}. A model
        can therefore take ids as input and store W as a table. Lecture A numbers the ids from 1 to 25; the code numbers
        them from 0 to 24.""")
    return embedding


def _print_one_hot_product_and_lookup() -> None:
    print_section("Lecture D: “thanks for all the” = [5, 4000, 10532, 2224], E is |V|×d, and x·E selects a row")
    embedding = TokenEmbedding(LECTURE_D_VOCAB_SIZE, EMBEDDING_WIDTH)
    ids = torch.tensor([list(THANKS.values())])
    one_hots = F.one_hot(ids[0], LECTURE_D_VOCAB_SIZE).float()
    product = one_hots @ embedding.weight
    embedded = embedding(ids)[0]
    print_text(f"""For N = {len(THANKS)} one-hot vectors, the shapes are (N×|V|)·(|V|×d) = {format_shape(one_hots)} ·
        {format_shape(embedding.weight)} = {format_shape(product)}.""")
    names = [f"row {i} ({word})" for word, i in THANKS.items()]
    print_matrix(product, rows=names, columns=[f"[{j}]" for j in range(EMBEDDING_WIDTH)])
    print_text(f"The product and the lookup are bit-identical: {torch.equal(product, embedded)}.")
    print_text("""The slide numbers the entries of a one-hot vector from 1, so id 5 selects the fifth row. The ids of a
        tokenizer start at 0, so id 5 selects the sixth row.""")

    print_section(f"The cost of the product and of the lookup (|V| = {LECTURE_D_VOCAB_SIZE:,}, d = {EMBEDDING_WIDTH})")
    product_microseconds = 1e6 * best_of_n_seconds(lambda: one_hots @ embedding.weight)
    lookup_microseconds = 1e6 * best_of_n_seconds(lambda: embedding(ids))
    print_table(
        ["", "multiplications and additions", "numbers read", "microseconds on this machine"],
        [
            (
                "product",
                2 * one_hots.numel() * EMBEDDING_WIDTH,
                one_hots.numel() + embedding.weight.numel(),
                product_microseconds,
            ),
            ("lookup", 0, ids.numel() + embedded.numel(), lookup_microseconds),
        ],
        digits=0,
    )


def _format_first_five(vector: Tensor) -> str:
    return " ".join(f"{number:6.2f}" for number in vector[:5].tolist())


def _draw_one_hot_lookup(embedding: TokenEmbedding) -> Figure:
    """Draw one-hot vectors, W and the columns of W that the vectors select, as in lecture A."""
    ids = torch.tensor([3, 17, EXAMPLE_TOKEN_ID, 20])
    columns = embedding.weight.detach().T
    figure = new_figure(width=10.0, height=5.2)
    grid = figure.subplots(2, 2, sharex="col", sharey="row", width_ratios=[25, 6], height_ratios=[4, 10])
    (one_hot_axes, corner), (table_axes, selected_axes) = grid
    one_hot_axes.imshow(F.one_hot(ids, 25).numpy(), cmap="Greys", vmin=0, vmax=1, aspect="auto")
    corner.axis("off")
    limit = columns.abs().max().item()
    image = table_axes.imshow(columns.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
    selected_axes.imshow(columns[:, ids].numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
    figure.colorbar(image, ax=grid, fraction=0.03)
    one_hot_axes.set_yticks(range(4), [f"id {i}" for i in ids.tolist()])
    table_axes.set_xticks(range(25))
    selected_axes.set_xticks(range(4), [f"id {i}" for i in ids.tolist()])
    style_and_label_axes(one_hot_axes, title="four one-hot vectors, one per row (black is 1)", x="", y="")
    style_and_label_axes(table_axes, title="W, 10×25", x="token", y="dimension")
    style_and_label_axes(selected_axes, title="W·X: the selected columns", x="", y="")
    figure.suptitle("A one-hot vector selects a column of W, so the product is equivalent to a table lookup")
    return figure
