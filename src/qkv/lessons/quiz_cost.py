"""Lecture E's quizzes about cost: every count is checked against operations counted by torch and real bytes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from qkv.choices import AttentionKernel
from qkv.config import GPTConfig, Seq2SeqConfig
from qkv.lessons.console import print_section, print_slide_error, print_table, print_text
from qkv.lessons.figure_style import Axes, label_axes
from qkv.models import GPT, Seq2Seq
from qkv.nn import use_attention_kernel

N_LAYERS, D = 2, 64
SOURCE_LENGTHS = (64, 128, 256, 512)


def counted(work: Callable[[], Any]) -> int:
    """Floating-point operations of the matrix products in `work`, as torch counts them."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def flops(model: nn.Module, *ids: Tensor) -> int:
    # On the plain road: torch counts nothing inside the CPU's fused attention.
    with use_attention_kernel(model, AttentionKernel.EAGER):
        return counted(lambda: model(*ids))


def answer(seed: int) -> dict[str, list[int]]:
    """Print the answers; give back the encoder–decoder's measured operations."""
    _matrix_product()
    _projection()
    _cache(seed)
    return _encoder_decoder(seed)


def _matrix_product() -> None:
    print_section("E: A (n×m) times B (m×k): how many operations, how much IO?")
    rows = []
    for n, m, k in ((3, 5, 7), (64, 64, 64), (128, 64, 512)):
        a, b = torch.randn(n, m), torch.randn(m, k)
        product = a @ b
        rows.append((
            f"{n}×{m} · {m}×{k}", counted(lambda a=a, b=b: a @ b), 2 * n * m * k,
            sum(t.numel() for t in (a, b, product)), n * m + m * k + n * k, n * m + m * k + n * m,
        ))  # fmt: skip
    print_table(["product", "counted", "2nmk", "numbers moved", "nm + mk + nk", "slide's IO"], rows)
    print_slide_error("""E counts the IO as nm + mk + nm: nm twice. The product AB has n×k numbers, so it is nm + mk + nk. The two
        agree only where m = k.""")


def _projection() -> None:
    b, n, d, h = 2, 10, 64, 4
    x, one, every = torch.randn(b, n, d), torch.randn(d, d // h), torch.randn(d, d)
    print_section(f"E: x·W_q for one head and for all (b = {b}, n = {n}, d = {d}, h = {h})")
    print_table(["", "operations", "2·bnd·(width)", "IO: x + W + result", "E's O(·)"], [
        (name, counted(lambda w=w: x @ w), 2 * b * n * d * w.shape[1], x.numel() + w.numel() + (x @ w).numel(), order)
        for name, w, order in (
            ("one head", one, "bnd·d/h; bnd + d·d/h + bn·d/h"), ("all heads", every, "bnd²; 2bnd + d²"),
        )
    ])  # fmt: skip
    print_text("All heads cost h times one head's operations, but x is read once.")


def _cache(seed: int) -> None:
    print_section("E: how much memory does the KV cache need?")
    rows = []
    for n, d, n_layers in ((10, 64, 2), (20, 64, 2), (20, 128, 2), (20, 128, 4)):
        config = GPTConfig(vocab_size=11, context_length=32, d_model=d, n_heads=4, n_layers=n_layers)
        model = GPT(config, seed=seed).eval()
        cache = model.new_cache(batch=1, capacity=n)
        with torch.no_grad():
            model(torch.zeros(1, n, dtype=torch.long), cache=cache)
        rows.append((n, d, n_layers, cache.n_bytes, cache.n_bytes // 4, 2 * n * d * n_layers))
    print_table(["n", "d", "L", "bytes of the real cache", "float32 numbers", "2ndL"], rows)
    print_text("Answer 4: 2ndL numbers, for keys and values of every token in every layer (× batch × bytes a number).")


def _encoder_decoder(seed: int) -> dict[str, list[int]]:
    print_section("E: encoder–decoder, source m, target n: what does a pass cost?")
    config = Seq2SeqConfig(
        vocab_size=11, context_length=512, d_model=D, n_heads=4, n_encoder_layers=N_LAYERS,
        n_decoder_layers=N_LAYERS,
    )  # fmt: skip
    model = Seq2Seq(config, seed=seed).eval()
    rows = []
    for m, n in (*((m, 64) for m in SOURCE_LENGTHS), (64, 128), (64, 256)):
        source, ids = torch.zeros(1, m, dtype=torch.long), torch.zeros(1, n, dtype=torch.long)
        with use_attention_kernel(model, AttentionKernel.EAGER):
            encoder = counted(lambda source=source: model.encode(source))
            states = model.encode(source)
            decoder = counted(lambda ids=ids, states=states: model.hidden_states(ids, states))
        formula = [N_LAYERS * f for f in (_self(m), _self(n) + 4 * n * D * D + 4 * m * D * D + 4 * n * m * D)]
        rows.append((m, n, encoder, formula[0], decoder, formula[1]))
    print_table(["m", "n", "encoder", "by formula", "decoder", "by formula"], rows)
    print_text("""By formula, a layer: self-attention and FFN 24md² + 4m²d for m tokens (d_ff = 4d), and cross-attention
        4nd² + 4md² + 4nmd. Answer: O(n²) + O(m²) + O(nm), or O(n²d + nd² + m²d + md² + nmd). A longer source
        raises the encoder's cost by m², the decoder's only in proportion to m.""")
    print_slide_error("""E names the three terms encoder, decoder and cross in this order, but n is the summary and m the passage:
        m² is the encoder's self-attention, n² the decoder's.""")
    same_target = rows[: len(SOURCE_LENGTHS)]
    return {"encoder": [row[2] for row in same_target], "decoder": [row[4] for row in same_target]}


def _self(n: int) -> int:
    return 24 * n * D * D + 4 * n * n * D


def draw(axes: Axes, measured: dict[str, list[int]], *, colours: Sequence[str]) -> None:
    for (name, values), colour, marker in zip(measured.items(), colours, "os", strict=True):
        axes.plot(SOURCE_LENGTHS, [value / 1e6 for value in values], color=colour, marker=marker, label=name)
    axes.legend(frameon=False)
    axes.set_xticks(SOURCE_LENGTHS, [str(m) for m in SOURCE_LENGTHS])
    label_axes(axes, title="Operations of one pass, target n = 64", x="source length m", y="million operations")
