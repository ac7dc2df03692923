"""What does a step of generation cost with a cache of keys and values, and what without?"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.config import GPTConfig
from qkv.cost import Mode, Workload, cache_bytes, count_flops
from qkv.inspection import new_figure
from qkv.lessons.console import max_abs_difference, print_section, print_slide_error, print_table, print_text
from qkv.lessons.figure_style import BLUE, ORANGE, DrawFigure, Figure, label_axes
from qkv.lessons.timer import best_of_n_seconds
from qkv.models import GPT
from qkv.nn import KVCache

CONFIG = GPTConfig(vocab_size=512, context_length=1024, d_model=128, n_heads=4, n_layers=4)
POSITIONS = (8, 32, 64, 128, 256, 384, 512, 768, 1000)


@dataclass(frozen=True)
class Measured:
    """One step: the n-th token is read, the next one is asked for."""

    n: int
    cached_ms: float
    recomputed_ms: float
    cached_flops: int
    recomputed_flops: int
    cache_bytes: int


def lesson(seed: int) -> DrawFigure:
    model = GPT(CONFIG, seed=seed).eval()
    ids = torch.randint(CONFIG.vocab_size, (1, CONFIG.context_length))
    with torch.inference_mode():
        _same_answer(model, ids)
        measured = [_measure(model, ids, n) for n in POSITIONS]
    _cost(measured)
    _memory(measured)
    return lambda: _draw(measured)


def _same_answer(model: GPT, ids: Tensor) -> None:
    print_section("The same answer with and without")
    whole = model(ids[:, :64])
    cache = model.new_cache(batch=1, capacity=64)
    steps = torch.cat([model(ids[:, n : n + 1], cache=cache) for n in range(64)], dim=1)
    print_text(f"""64 tokens one by one, each step reading one token and the cache: the logits differ from one pass over all
        of them by at most {max_abs_difference(whole, steps)}. It works because no token looks ahead: keys and values of the
        past never change when a token is added.""")
    print_slide_error("""E writes k_new = W·x[:, :−1]. In Python that is every token but the last; meant is x[:, −1:], the new one
        alone.""")


def _filled(model: GPT, ids: Tensor, n: int) -> KVCache:
    """A cache that holds the tokens before the n-th."""
    cache = model.new_cache(batch=1, capacity=n)
    model.hidden_states(ids[:, : n - 1], cache=cache)
    return cache


def _measure(model: GPT, ids: Tensor, n: int) -> Measured:
    # A step moves its cache on, so each repeat has its own.
    caches = iter([_filled(model, ids, n) for _ in range(9)])
    last = ids[:, n - 1 : n]
    work = {mode: Workload(batch_size=1, seq_len=n, mode=mode) for mode in (Mode.DECODE, Mode.FORWARD)}
    return Measured(
        n=n,
        cached_ms=1e3 * best_of_n_seconds(lambda: model(last, cache=next(caches)), times=9),
        recomputed_ms=1e3 * best_of_n_seconds(lambda: model(ids[:, :n]), times=5),
        cached_flops=count_flops(model.config, work[Mode.DECODE]).forward,
        recomputed_flops=count_flops(model.config, work[Mode.FORWARD]).forward,
        cache_bytes=_filled(model, ids, n).n_bytes,
    )


def _cost(measured: list[Measured]) -> None:
    d, n_layers = CONFIG.d_model, CONFIG.n_layers
    print_section(f"The cost of step n (b = 1, d = {d}, L = {n_layers}, V = {CONFIG.vocab_size})")
    print_table(
        ["n", "FLOPs cached", "recomputed", "ratio", "ms cached", "recomputed", "ratio"],
        [(one.n, one.cached_flops, one.recomputed_flops, one.recomputed_flops / one.cached_flops,
          one.cached_ms, one.recomputed_ms, one.recomputed_ms / one.cached_ms) for one in measured],
        digits=2,
    )  # fmt: skip
    first, last = measured[0], measured[-1]
    slope = (last.cached_flops - first.cached_flops) // (last.n - first.n)
    fixed = first.cached_flops - slope * first.n
    print_text(f"""With the cache a step costs {fixed:,} + {slope:,}·n FLOPs. The first number is the products with weights,
        O(bd²): 24d²L + 2dV = {24 * d * d * n_layers + 2 * d * CONFIG.vocab_size:,}. The second is scores and mix,
        O(bnd): 4dL = {4 * d * n_layers:,} a token looked at. Recomputed, the step is a whole pass: O(bnd² + bn²d).""")
    cached = [fixed + slope * n for n in range(1, 1001)]
    recomputed = sum(n * one for n, one in enumerate(cached, start=1))
    print_text(f"""A text of 1,000 tokens: {sum(cached) / 1e9:,.1f} GFLOP with the cache, {recomputed / 1e9:,.0f} without:
        {recomputed / sum(cached):,.0f} times as many.""")


def _memory(measured: list[Measured]) -> None:
    print_section("What the cache holds: 2·n·d·L numbers a text, 4 bytes each")
    width = CONFIG.d_model * CONFIG.n_layers
    print_table(
        ["n", "bytes of the real cache", "2·n·d·L·4", "by qkv.cost"],
        [(one.n, one.cache_bytes, 2 * one.n * width * 4, cache_bytes(CONFIG, batch_size=1, seq_len=one.n))
         for one in measured],
    )  # fmt: skip


def _draw(measured: list[Measured]) -> Figure:
    figure = new_figure(width=10.0, height=4.2)
    times, counts = figure.subplots(1, 2)
    for name, colour, marker in (("cached", BLUE, "o"), ("recomputed", ORANGE, "s")):
        times.plot(POSITIONS, [getattr(one, f"{name}_ms") for one in measured], color=colour, marker=marker, label=name)
        counts.plot(POSITIONS, [getattr(one, f"{name}_flops") / 1e6 for one in measured], color=colour, marker=marker)
    times.legend(frameon=False, loc="upper left")
    label_axes(times, title="Time of one step, measured", x="position n", y="milliseconds")
    counts.set_yscale("log")
    label_axes(counts, title="Operations of one step, counted", x="position n", y="million FLOPs (log scale)")
    figure.suptitle("With a cache a step hardly grows with the text; without, it computes the whole text again")
    return figure
