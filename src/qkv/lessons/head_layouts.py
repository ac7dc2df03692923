"""How can several heads share one attention, and how many weights does each way take?"""

from dataclasses import replace

import torch

from qkv.choices import HeadLayout
from qkv.inspection import new_figure, record
from qkv.lessons.console import (
    format_shape,
    max_abs_difference,
    print_section,
    print_slide_error,
    print_table,
    print_text,
)
from qkv.lessons.figure_style import BLUE, GREEN, ORANGE, RED, DrawFigure, Figure, label_axes
from qkv.nn import Attention, HeadConfig, TokenEmbedding, scaled_dot_product_attention

D_MODEL, N_HEADS = 512, 8
HEAD_COUNTS = (1, 2, 4, 8, 16)


def _attention(layout: str, d: int, h: int) -> Attention:
    """The lectures' layouts by name, without biases, as the lectures count."""
    join = HeadLayout.POOLED if layout.startswith("pooled") else HeadLayout.SPLIT
    d_value = d // h if layout == "split" else d
    heads = HeadConfig(n_heads=h, n_kv_heads=h, d_head=d // h, d_value=d_value, layout=join)
    return Attention(d, heads, bias=False, output_projection=layout != "pooled, no W_O")


LAYOUTS = {
    "split": ("4d²", lambda _: 4),
    "pooled, no W_O": ("(2+h)d²", lambda h: 2 + h),
    "pooled": ("(2+h)d² + d²", lambda h: 3 + h),
    "free, d_v = d": ("2d² + 2hd²", lambda h: 2 + 2 * h),
}


@torch.no_grad()
def lesson(seed: int) -> DrawFigure:  # noqa: ARG001 - torch's chance has started at the seed
    _five_steps()
    _three_ways()
    _count()
    return _draw


def _five_steps() -> None:
    print_section(f"Lecture B's five steps, {N_HEADS} heads, d = {D_MODEL}")
    ids = torch.arange(2)[None]
    x = TokenEmbedding(2, D_MODEL)(ids)
    attention = _attention("split", D_MODEL, N_HEADS)
    with record(attention, "queries", "weights", "head_outputs") as seen:
        output = attention(x)
    print_table(
        ["step", "", "shape"],
        [
            ("1", "the sentence: Thinking Machines", format_shape(ids)),
            ("2", "embed each word: X", format_shape(x)),
            ("3", f"X·W_Q, split into {N_HEADS} heads (K and V alike)", format_shape(seen["queries"])),
            ("4", "attention of each head, scaled by √(d/h): its weights", format_shape(seen["weights"])),
            ("", "  and its Z", format_shape(seen["head_outputs"])),
            ("5", "concatenate the Z, multiply by W_O: R", format_shape(output)),
        ],
    )
    above = format_shape(_attention("split", D_MODEL, N_HEADS)(output))
    print_text(f"The layer above starts at step 3, with R in the place of X: {format_shape(output)} in, {above} out.")


def _three_ways() -> None:
    print_section("Matrices for each head, one product and a reshape, a loop: one result")
    x = torch.randn(1, 7, D_MODEL)
    attention = _attention("split", D_MODEL, N_HEADS)
    parts = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
    w_o = attention.out_proj.get_parameter("weight")
    matrices = [part.view(N_HEADS, -1, D_MODEL).transpose(1, 2) for part in parts]
    looped = [scaled_dot_product_attention(*((x @ per_head[j])[:, None] for per_head in matrices))[:, 0] for j in range(N_HEADS)]
    stacked = scaled_dot_product_attention(*(x[:, None] @ per_head for per_head in matrices))
    roads = (
        ("one product, reshaped (qkv)", "d×d", attention(x)),
        ("a loop over the heads", "h times d×d/h", torch.cat(looped, -1) @ w_o.T),
        ("all heads' matrices at once", "h×d×d/h", stacked.transpose(1, 2).flatten(2) @ w_o.T),
    )
    rows = [(name, how, format_shape(result), max_abs_difference(result, attention(x))) for name, how, result in roads]
    print_table(["", "W_Q", "result", "differs by at most"], rows)

    print_section("Pooled heads: values at full width, results added (lecture C's “less common way”)")
    pooled = _attention("pooled, no W_O", D_MODEL, N_HEADS)
    averaging = replace(pooled.head_config, layout=HeadLayout.POOLED_MEAN)
    mean = Attention(D_MODEL, averaging, bias=False, output_projection=False)
    mean.load_state_dict(pooled.state_dict())
    free = _attention("free, d_v = d", D_MODEL, N_HEADS)
    free.load_state_dict({**pooled.state_dict(), "out_proj.weight": torch.eye(D_MODEL).repeat(1, N_HEADS)})
    print_text(f"""Averaged, not added, it is {N_HEADS} times smaller (difference {max_abs_difference(mean(x) * N_HEADS, pooled(x))}).
        Adding is a special W_O: full-width results side by side, times {N_HEADS} identity matrices on top of each
        other (difference {max_abs_difference(free(x), pooled(x))}).""")


def _count() -> None:
    print_section("Weights of one layer, counted in the built module (no biases)")
    sizes = {name: [_size(name, D_MODEL, h) for h in HEAD_COUNTS] for name in LAYOUTS}
    rows = [[name, formula, *sizes[name]] for name, (formula, _) in LAYOUTS.items()]
    print_table(["layout", "formula", *(f"h = {h}" for h in HEAD_COUNTS)], rows)
    by_formula = {name: [n(h) * D_MODEL**2 for h in HEAD_COUNTS] for name, (_, n) in LAYOUTS.items()}
    print_text(f"""d = {D_MODEL}. Formula and count agree in every cell: {sizes == by_formula}. The free layout takes any
        d_v: with d_v = d/h it is the split one.""")
    layers, width = 96, 12 * 1024
    counted = layers * _size("split", width, layers)
    print_slide_error(f"""C's line for GPT-3 reads 96 · (12·1024)² = 58 billion. That product is {layers * width**2:,}; the 4 of its
        own formula is missing. Counted in {layers} layers of that width: {counted:,}.""")


def _size(layout: str, d: int, h: int) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in _attention(layout, d, h).parameters())


def _draw() -> Figure:
    figure = new_figure(width=7.0, height=4.5)
    axes = figure.subplots()
    for name, colour, marker in zip(LAYOUTS, (BLUE, ORANGE, GREEN, RED), "os^D", strict=True):
        sizes = [_size(name, D_MODEL, h) / D_MODEL**2 for h in HEAD_COUNTS]
        text = f"{name}: {LAYOUTS[name][0]}"
        axes.plot([str(h) for h in HEAD_COUNTS], sizes, color=colour, marker=marker, label=text)
    axes.legend(frameon=False)
    label_axes(axes, title="Only split heads cost the same for any h", x="heads h", y="weights of one layer, in d²")
    return figure
