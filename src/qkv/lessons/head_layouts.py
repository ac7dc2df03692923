"""Lesson: the head layouts of multi-head attention and their parameter counts."""

from dataclasses import replace

import torch

from qkv.choices import HeadCombination
from qkv.inspection import new_figure, record
from qkv.lessons.console import (
    format_shape,
    max_abs_difference,
    print_section,
    print_slide_error,
    print_table,
    print_text,
)
from qkv.lessons.figure_style import BLUE, GREEN, ORANGE, RED, DrawFigure, Figure, style_and_label_axes
from qkv.nn import Attention, HeadConfig, TokenEmbedding, scaled_dot_product_attention
from qkv.tensors import Residual

D_MODEL, N_HEADS = 512, 8
HEAD_COUNTS = (1, 2, 4, 8, 16)


def _build_attention_without_biases(layout: str, d_model: int, n_heads: int) -> Attention:
    """Build an attention layer without biases that has one of the head layouts from the lectures."""
    join = HeadCombination.POOLED if layout.startswith("pooled") else HeadCombination.SPLIT
    d_head = d_model // n_heads
    d_value = d_head if layout == "split" else d_model
    heads = HeadConfig(n_heads=n_heads, n_kv_heads=n_heads, d_head=d_head, d_value=d_value, combination=join)
    return Attention(d_model, heads, bias=False, output_projection=layout != "pooled, no W_O")


LAYOUTS = {
    "split": ("4d²", lambda _: 4),
    "pooled, no W_O": ("(2+h)d²", lambda h: 2 + h),
    "pooled": ("(2+h)d² + d²", lambda h: 3 + h),
    "free, d_v = d": ("2d² + 2hd²", lambda h: 2 + 2 * h),
}


@torch.no_grad()
def lesson(seed: int) -> DrawFigure:  # noqa: ARG001 - `run` has already seeded torch
    _print_shapes_of_attention_steps()
    x = torch.randn(1, 7, D_MODEL)
    _print_looped_and_stacked_head_differences(x)
    _print_pooled_head_equivalences(x)
    _print_parameter_counts()
    return _draw_parameter_counts


def _print_shapes_of_attention_steps() -> None:
    print_section(f"The five steps of lecture B with {N_HEADS} heads and d = {D_MODEL}")
    ids = torch.arange(2)[None]
    x = TokenEmbedding(2, D_MODEL)(ids)
    attention = _build_attention_without_biases("split", D_MODEL, N_HEADS)
    with record(attention, "queries", "weights", "head_outputs") as cache:
        output = attention(x)
    print_table(
        ["step", "", "shape"],
        [
            ("1", "the sentence: Thinking Machines", format_shape(ids)),
            ("2", "embed each word: X", format_shape(x)),
            ("3", f"X·W_Q, split into {N_HEADS} heads (same for K and V)", format_shape(cache["queries"])),
            ("4", "attention weights of each head (scores ÷ √(d/h))", format_shape(cache["weights"])),
            ("", "  and the output Z", format_shape(cache["head_outputs"])),
            ("5", "concatenate all Z and multiply by W_O: R", format_shape(output)),
        ],
    )
    next_layer_shape = format_shape(_build_attention_without_biases("split", D_MODEL, N_HEADS)(output))
    print_text(
        f"The next layer starts at step 3 with R instead of X. Its input has shape {format_shape(output)}, and its "
        f"output has shape {next_layer_shape}."
    )


def _print_looped_and_stacked_head_differences(x: Residual) -> None:
    print_section("Three implementations of multi-head attention that give the same result")
    attention = _build_attention_without_biases("split", D_MODEL, N_HEADS)
    parts = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
    w_o = attention.out_proj.get_parameter("weight")
    matrices = [part.view(N_HEADS, -1, D_MODEL).transpose(1, 2) for part in parts]
    looped = [
        scaled_dot_product_attention(*((x @ per_head[j])[:, None] for per_head in matrices))[:, 0]
        for j in range(N_HEADS)
    ]
    stacked = scaled_dot_product_attention(*(x[:, None] @ per_head for per_head in matrices))
    implementations = (
        ("one product, reshaped (qkv)", "d×d", attention(x)),
        ("a loop over heads", "h times d×d/h", torch.cat(looped, -1) @ w_o.T),
        ("stacked matrices of all heads", "h×d×d/h", stacked.transpose(1, 2).flatten(2) @ w_o.T),
    )
    rows = [
        (name, w_q_shape, format_shape(result), max_abs_difference(result, attention(x)))
        for name, w_q_shape, result in implementations
    ]
    print_table(["", "W_Q", "result", "largest difference"], rows)


def _print_pooled_head_equivalences(x: Residual) -> None:
    print_section("Pooled heads: the sum of full-width head outputs (the “less common way” of lecture C)")
    pooled = _build_attention_without_biases("pooled, no W_O", D_MODEL, N_HEADS)
    mean_config = replace(pooled.head_config, combination=HeadCombination.POOLED_MEAN)
    mean = Attention(D_MODEL, mean_config, bias=False, output_projection=False)
    mean.load_state_dict(pooled.state_dict())
    free = _build_attention_without_biases("free, d_v = d", D_MODEL, N_HEADS)
    free.load_state_dict({**pooled.state_dict(), "out_proj.weight": torch.eye(D_MODEL).repeat(1, N_HEADS)})
    print_text(f"""If the head outputs are averaged instead of summed, the result is {N_HEADS} times smaller (largest
        difference after multiplying by {N_HEADS}: {max_abs_difference(mean(x) * N_HEADS, pooled(x))}). Summing the head
        outputs is equivalent to concatenating them and using {N_HEADS} stacked identity matrices as W_O (largest
        difference: {max_abs_difference(free(x), pooled(x))}).""")


def _print_parameter_counts() -> None:
    print_section("Number of parameters of one attention layer without biases")
    sizes = {name: [_count_parameters(name, D_MODEL, h) for h in HEAD_COUNTS] for name in LAYOUTS}
    rows = [[name, formula, *sizes[name]] for name, (formula, _) in LAYOUTS.items()]
    print_table(["layout", "formula", *(f"h = {h}" for h in HEAD_COUNTS)], rows)
    by_formula = {name: [n(h) * D_MODEL**2 for h in HEAD_COUNTS] for name, (_, n) in LAYOUTS.items()}
    print_text(f"""For d = {D_MODEL}, the formulas and the counts agree in every cell: {sizes == by_formula}. The free
        layout allows any d_v. With d_v = d/h, the free layout is the split layout.""")
    layers, width = 96, 12 * 1024
    counted = layers * _count_parameters("split", width, layers)
    print_slide_error(f"""For GPT-3, lecture C writes 96 · (12·1024)² = 58 billion. This product is only
        {layers * width**2:,} because it omits the factor 4 of the lecture's own formula. The correct number of
        parameters for {layers} layers of this width is {counted:,}.""")


def _count_parameters(layout: str, d: int, h: int) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in _build_attention_without_biases(layout, d, h).parameters())


def _draw_parameter_counts() -> Figure:
    figure = new_figure(width=7.0, height=4.5)
    axes = figure.subplots()
    for name, color, marker in zip(LAYOUTS, (BLUE, ORANGE, GREEN, RED), "os^D", strict=True):
        sizes = [_count_parameters(name, D_MODEL, h) / D_MODEL**2 for h in HEAD_COUNTS]
        text = f"{name}: {LAYOUTS[name][0]}"
        axes.plot([str(h) for h in HEAD_COUNTS], sizes, color=color, marker=marker, label=text)
    axes.legend(frameon=False)
    style_and_label_axes(
        axes,
        title="Only the split layout has the same number of parameters for any h",
        x="heads h",
        y="parameters of one layer, in d²",
    )
    return figure
