"""Lesson: the tensor shapes at each step of attention, and how all queries are computed at once."""

import torch
from torch import Tensor

from qkv.inspection import new_figure, record
from qkv.lessons.console import format_shape, max_abs_difference, print_section, print_table, print_text
from qkv.lessons.figure_style import BLUE, RED, DrawFigure, Figure, style_and_label_axes
from qkv.lessons.timer import best_of_n_seconds
from qkv.nn import Attention, HeadConfig, scaled_dot_product_attention

MODEL_WIDTH = 16
N_TARGETS, N_SOURCES = 5, 7
SEQUENCE_LENGTHS = (64, 128, 256, 512, 1024)
STEPS = (
    ("queries Q", "x·W_Q", "T×d", "queries"),
    ("keys K", "source·W_K", "T̄×d", "keys"),
    ("values V", "source·W_V", "T̄×d", "values"),
    ("scores", "Q·Kᵀ/√d", "T×T̄", "scores"),
    ("weights A", "softmax", "T×T̄", "weights"),
    ("weighted sum", "A·V", "T×d", "head_outputs"),
)


def lesson(seed: int) -> DrawFigure:  # noqa: ARG001 - `run` has already seeded torch
    _print_attention_shapes()
    _print_batched_and_looped_difference()
    times = _print_batched_and_looped_milliseconds()
    return lambda: _plot_latency_by_seq_len(times)


def _print_attention_shapes() -> None:
    print_section(f"Shapes at every step: T = {N_TARGETS} targets, T̄ = {N_SOURCES} sources, d = {MODEL_WIDTH}")
    print_text("""Self-attention and cross-attention are the same function with different sources. In qkv, every tensor
        also has a batch dimension. The tensors of the heads have shape (batch, head, position, width).""")
    cases = {"self": (1, 1, None), "cross": (1, 1, N_SOURCES), "cross, batch 3, 4 heads": (3, 4, N_SOURCES)}
    columns = {name: _record_attention_shapes(*case) for name, case in cases.items()}
    steps = [("input x", "", "T×d"), ("source", "", "T̄×d"), *(step[:3] for step in STEPS), ("output", "·W_O", "T×d")]
    print_table(
        ["", "computation", "lecture", *columns],
        [[*step, *rest] for step, *rest in zip(steps, *columns.values(), strict=True)],
    )
    print_text("""For self-attention, T̄ = T and the source is x. In lecture E, the batch is the first dimension: the
        input is b×n×d, the scores are b×n×n, and the output is b×n×d. With h heads, a query has width d/h, and W_O
        combines the outputs of the heads.""")


def _record_attention_shapes(batch: int, n_heads: int, n_source: int | None) -> list[str]:
    attention = Attention(MODEL_WIDTH, HeadConfig.split(MODEL_WIDTH, n_heads))
    x = torch.randn(batch, N_TARGETS, MODEL_WIDTH)
    source = None if n_source is None else torch.randn(batch, n_source, MODEL_WIDTH)
    with torch.no_grad(), record(attention, *(tap for *_, tap in STEPS)) as cache:
        output = attention(x, source=source)
    actual_source = x if source is None else source
    return [format_shape(part) for part in (x, actual_source, *(cache[tap] for *_, tap in STEPS), output)]


def _print_batched_and_looped_difference() -> None:
    print_section("Computing all queries at once gives the same result as computing one at a time")
    queries, keys, values = (torch.randn(1, 1, n, MODEL_WIDTH) for n in (N_TARGETS, N_SOURCES, N_SOURCES))
    batched = scaled_dot_product_attention(queries, keys, values)
    looped = _attend_one_by_one(queries, keys, values)
    print_text(f"""For {N_TARGETS} queries and {N_SOURCES} keys, the results of one product and of a loop over the
        queries differ by at most {max_abs_difference(batched, looped)}. The result for a query does not depend on the
        results for other queries, so all results can be computed in parallel (“parallelizing” in lecture D).""")


def _attend_one_by_one(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return torch.cat([scaled_dot_product_attention(query, keys, values) for query in queries.split(1, dim=2)], dim=2)


def _print_batched_and_looped_milliseconds() -> dict[str, list[float]]:
    print_section("Run time (self-attention with one head, d = 64, on one core of this machine)")
    times = {"one at a time": [], "all at once": []}
    for length in SEQUENCE_LENGTHS:
        parts = [torch.randn(1, 1, length, 64) for _ in range(3)]
        times["one at a time"].append(1000 * best_of_n_seconds(lambda parts=parts: _attend_one_by_one(*parts)))
        times["all at once"].append(1000 * best_of_n_seconds(lambda parts=parts: scaled_dot_product_attention(*parts)))
    print_table(
        ["n", "one at a time, ms", "all at once, ms", "speedup"],
        [(n, slow, fast, slow / fast) for n, slow, fast in zip(SEQUENCE_LENGTHS, *times.values(), strict=True)],
        digits=2,
    )
    return times


def _plot_latency_by_seq_len(times: dict[str, list[float]]) -> Figure:
    figure = new_figure(width=6.5, height=4.5)
    axes = figure.subplots()
    for (name, milliseconds), color, marker in zip(times.items(), (RED, BLUE), "os", strict=True):
        axes.plot(SEQUENCE_LENGTHS, milliseconds, color=color, marker=marker, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(SEQUENCE_LENGTHS, [str(length) for length in SEQUENCE_LENGTHS])
    axes.legend(frameon=False)
    style_and_label_axes(
        axes, title="Computing all queries in one product is faster", x="length n", y="milliseconds (log)"
    )
    return figure
