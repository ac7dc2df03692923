"""Which shape has what at each step, and do all queries at once give the same as one at a time?"""

import torch
from torch import Tensor

from qkv.inspection import new_figure, record
from qkv.lessons.console import format_shape, max_abs_difference, print_section, print_table, print_text
from qkv.lessons.figure_style import BLUE, RED, DrawFigure, Figure, label_axes
from qkv.lessons.timer import best_of_n_seconds
from qkv.nn import Attention, HeadConfig, scaled_dot_product_attention

D_MODEL = 16
TARGET, SOURCE = 5, 7
LENGTHS = (64, 128, 256, 512, 1024)
STEPS = (
    ("queries Q", "x·W_Q", "T×d", "queries"),
    ("keys K", "source·W_K", "T̄×d", "keys"),
    ("values V", "source·W_V", "T̄×d", "values"),
    ("scores", "Q·Kᵀ/√d", "T×T̄", "scores"),
    ("weights A", "softmax", "T×T̄", "weights"),
    ("mixed", "A·V", "T×d", "head_outputs"),
)


def lesson(seed: int) -> DrawFigure:  # noqa: ARG001 - torch's chance has started at the seed
    _show_shapes()
    _agree()
    times = _measure()
    return lambda: _draw(times)


def _show_shapes() -> None:
    print_section(f"Shapes at every step: T = {TARGET} targets, T̄ = {SOURCE} sources, d = {D_MODEL}")
    print_text("""Self- and cross-attention are one function; only what it looks at differs. In qkv every tensor also has
        a batch and a head axis in front: (batch, head, position, width).""")
    cases = {"self": (1, 1, None), "cross": (1, 1, SOURCE), "cross, batch 3, 4 heads": (3, 4, SOURCE)}
    columns = {name: _shapes(*case) for name, case in cases.items()}
    steps = [("input x", "", "T×d"), ("source", "", "T̄×d"), *(step[:3] for step in STEPS), ("output", "·W_O", "T×d")]
    print_table(
        ["", "how", "lecture", *columns], [[*step, *rest] for step, *rest in zip(steps, *columns.values(), strict=True)]
    )
    print_text("""For self-attention T̄ = T and the source is x itself. Lecture E's batch is the first axis: b×n×d in,
        b×n×n scores, b×n×d out. With h heads a query has width d/h, and the heads are joined again by W_O.""")


def _shapes(batch: int, n_heads: int, n_source: int | None) -> list[str]:
    attention = Attention(D_MODEL, HeadConfig.split(D_MODEL, n_heads))
    x = torch.randn(batch, TARGET, D_MODEL)
    source = None if n_source is None else torch.randn(batch, n_source, D_MODEL)
    with torch.no_grad(), record(attention, *(tap for *_, tap in STEPS)) as seen:
        output = attention(x, source=source)
    looked_at = x if source is None else source
    return [format_shape(part) for part in (x, looked_at, *(seen[tap] for *_, tap in STEPS), output)]


def _agree() -> None:
    print_section("All queries at once are the same as one at a time")
    queries, keys, values = (torch.randn(1, 1, n, D_MODEL) for n in (TARGET, SOURCE, SOURCE))
    together, apart = scaled_dot_product_attention(queries, keys, values), _apart(queries, keys, values)
    print_text(f"""{TARGET} queries over {SOURCE} keys, in one product and in a loop: largest difference
        {max_abs_difference(together, apart)}. No query needs another's result, so all can be computed side by
        side (lecture D's “parallelizing”).""")


def _apart(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return torch.cat([scaled_dot_product_attention(one, keys, values) for one in queries.split(1, dim=2)], dim=2)


def _measure() -> dict[str, list[float]]:
    print_section("And faster (self-attention of one head, d = 64, on one core of this machine)")
    times = {"one at a time": [], "all at once": []}
    for length in LENGTHS:
        parts = [torch.randn(1, 1, length, 64) for _ in range(3)]
        times["one at a time"].append(1000 * best_of_n_seconds(lambda parts=parts: _apart(*parts)))
        times["all at once"].append(1000 * best_of_n_seconds(lambda parts=parts: scaled_dot_product_attention(*parts)))
    print_table(
        ["n", "one at a time, ms", "all at once, ms", "times faster"],
        [(n, slow, fast, slow / fast) for n, slow, fast in zip(LENGTHS, *times.values(), strict=True)],
        digits=2,
    )
    return times


def _draw(times: dict[str, list[float]]) -> Figure:
    figure = new_figure(width=6.5, height=4.5)
    axes = figure.subplots()
    for (name, measured), colour, marker in zip(times.items(), (RED, BLUE), "os", strict=True):
        axes.plot(LENGTHS, measured, color=colour, marker=marker, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(LENGTHS, [str(length) for length in LENGTHS])
    axes.legend(frameon=False)
    label_axes(
        axes, title="The same numbers: all queries in one product are faster", x="length n", y="milliseconds (log)"
    )
    return figure
