"""Quiz questions from lecture E about cost, checked against FLOPs counted by PyTorch and actual cache sizes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from qkv.choices import AttentionKernel
from qkv.config import GPTConfig, Seq2SeqConfig
from qkv.lessons.console import print_section, print_slide_error, print_table, print_text
from qkv.lessons.figure_style import Axes, style_and_label_axes
from qkv.models import GPT, Seq2Seq
from qkv.nn import use_attention_kernel

N_LAYERS, D = 2, 64
SOURCE_LENGTHS = (64, 128, 256, 512)


class FlopsBySourceLength(NamedTuple):
    """The FLOPs of the encoder and of the decoder for each length in `SOURCE_LENGTHS`."""

    encoder: list[int]
    decoder: list[int]


def count_flops(work: Callable[[], Any]) -> int:
    """Count the FLOPs of the matrix products that `work` computes, using PyTorch's FLOP counter."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def count_model_flops(model: nn.Module, *ids: Tensor) -> int:
    """Count the FLOPs of one forward pass of a model."""
    # PyTorch does not count FLOPs inside the fused CPU attention kernel.
    with use_attention_kernel(model, AttentionKernel.EAGER):
        return count_flops(lambda: model(*ids))


def print_quiz_cost_answers(seed: int) -> FlopsBySourceLength:
    """Print the quiz answers and return the FLOPs counted for the encoder and the decoder."""
    _print_matmul_flops_and_traffic()
    _print_one_and_all_head_projection_costs()
    _print_measured_kv_cache_bytes(seed)
    return _print_encoder_decoder_flops(seed)


def _print_matmul_flops_and_traffic() -> None:
    print_section("Lecture E: FLOPs and memory traffic of A (n×m) times B (m×k)")
    rows = []
    for n, m, k in ((3, 5, 7), (64, 64, 64), (128, 64, 512)):
        a, b = torch.randn(n, m), torch.randn(m, k)
        product = a @ b
        rows.append(
            (
                f"{n}×{m} · {m}×{k}",
                count_flops(lambda a=a, b=b: a @ b),
                2 * n * m * k,
                sum(t.numel() for t in (a, b, product)),
                n * m + m * k + n * k,
                n * m + m * k + n * m,
            )
        )
    print_table(["product", "counted", "2nmk", "numbers moved", "nm + mk + nk", "slide's IO"], rows)
    print_slide_error("""Lecture E counts the memory traffic as nm + mk + nm, which includes nm twice. The product AB
        has n×k elements, so the correct count is nm + mk + nk. The two counts agree only if m = k.""")


def _print_one_and_all_head_projection_costs() -> None:
    b, n, d, h = 2, 10, 64, 4
    x, head_weight, full_weight = torch.randn(b, n, d), torch.randn(d, d // h), torch.randn(d, d)
    print_section(f"Lecture E: x·W_q for one head and for all heads (b = {b}, n = {n}, d = {d}, h = {h})")
    print_table(
        ["", "FLOPs", "2·bnd·(width)", "IO: x + W + result", "lecture O(·)"],
        [
            (
                name,
                count_flops(lambda w=w: x @ w),
                2 * b * n * d * w.shape[1],
                x.numel() + w.numel() + (x @ w).numel(),
                order,
            )
            for name, w, order in (
                ("one head", head_weight, "bnd·d/h; bnd + d·d/h + bn·d/h"),
                ("all heads", full_weight, "bnd²; 2bnd + d²"),
            )
        ],
    )
    print_text(
        "The projection for all heads costs h times the FLOPs of the projection for one head, but x is read only once."
    )


def _print_measured_kv_cache_bytes(seed: int) -> None:
    print_section("Lecture E: how much memory does the KV cache need?")
    rows = []
    for n, d, n_layers in ((10, 64, 2), (20, 64, 2), (20, 128, 2), (20, 128, 4)):
        config = GPTConfig(vocab_size=11, context_length=32, d_model=d, n_heads=4, n_layers=n_layers)
        model = GPT(config, seed=seed).eval()
        cache = model.new_cache(batch=1, capacity=n)
        with torch.no_grad():
            model(torch.zeros(1, n, dtype=torch.long), cache=cache)
        rows.append((n, d, n_layers, cache.n_bytes, cache.n_bytes // 4, 2 * n * d * n_layers))
    print_table(["n", "d", "L", "bytes of the cache", "float32 numbers", "2ndL"], rows)
    print_text("""Answer 4: 2ndL. The cache stores a key and a value of width d for each of the n tokens in each of the
        L layers. To get the size in bytes, multiply 2ndL by the batch size and the number of bytes per number.""")


def _print_encoder_decoder_flops(seed: int) -> FlopsBySourceLength:
    print_section("Lecture E: the cost of an encoder–decoder with source length m and target length n")
    config = Seq2SeqConfig(
        vocab_size=11,
        context_length=512,
        d_model=D,
        n_heads=4,
        n_encoder_layers=N_LAYERS,
        n_decoder_layers=N_LAYERS,
    )
    model = Seq2Seq(config, seed=seed).eval()
    rows = []
    for m, n in (*((m, 64) for m in SOURCE_LENGTHS), (64, 128), (64, 256)):
        source, ids = torch.zeros(1, m, dtype=torch.long), torch.zeros(1, n, dtype=torch.long)
        with use_attention_kernel(model, AttentionKernel.EAGER):
            encoder = count_flops(lambda source=source: model.encode(source))
            states = model.encode(source)
            decoder = count_flops(lambda ids=ids, states=states: model.hidden_states(ids, states))
        formula = [
            N_LAYERS * f
            for f in (
                _self_attention_flops(m),
                _self_attention_flops(n) + 4 * n * D * D + 4 * m * D * D + 4 * n * m * D,
            )
        ]
        rows.append((m, n, encoder, formula[0], decoder, formula[1]))
    print_table(["m", "n", "encoder", "formula", "decoder", "formula"], rows)
    print_text("""In one layer with d_ff = 4d, self-attention and the FFN cost 24md² + 4m²d FLOPs for m tokens.
        Cross-attention costs another 4nd² + 4md² + 4nmd FLOPs.""")
    print_text("""Answer: O(n²) + O(m²) + O(nm) or, including the width d, O(n²d + nd² + m²d + md² + nmd). As the source
        gets longer, the cost of the encoder grows with m², and the cost of the decoder grows linearly with m.""")
    print_slide_error("""Lecture E labels the three terms encoder, decoder and cross-attention, in this order. However,
        n is the length of the summary and m is the length of the passage. The term m² therefore belongs to the
        self-attention of the encoder, and n² belongs to the self-attention of the decoder.""")
    same_target = rows[: len(SOURCE_LENGTHS)]
    return FlopsBySourceLength(encoder=[row[2] for row in same_target], decoder=[row[4] for row in same_target])


def _self_attention_flops(n: int) -> int:
    return 24 * n * D * D + 4 * n * n * D


def plot_flops_by_source_length(axes: Axes, flops: FlopsBySourceLength, *, colors: Sequence[str]) -> None:
    """Plot the FLOPs of the encoder and the decoder as a function of the source length."""
    for (name, values), color, marker in zip(flops._asdict().items(), colors, "os", strict=True):
        axes.plot(SOURCE_LENGTHS, [value / 1e6 for value in values], color=color, marker=marker, label=name)
    axes.legend(frameon=False)
    axes.set_xticks(SOURCE_LENGTHS, [str(m) for m in SOURCE_LENGTHS])
    style_and_label_axes(
        axes, title="FLOPs of one pass with target length n = 64", x="source length m", y="million FLOPs"
    )
