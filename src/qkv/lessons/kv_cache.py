"""Lesson: the cost of a decoding step with and without a KV cache."""

from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.config import GPTConfig
from qkv.cost import Mode, Workload, cache_bytes, count_flops
from qkv.inspection import new_figure
from qkv.lessons.console import max_abs_difference, print_section, print_slide_error, print_table, print_text
from qkv.lessons.figure_style import BLUE, ORANGE, DrawFigure, Figure, style_and_label_axes
from qkv.lessons.timer import best_of_n_seconds
from qkv.models import GPT
from qkv.nn import KVCache

GPT_CONFIG = GPTConfig(vocab_size=512, context_length=1024, d_model=128, n_heads=4, n_layers=4)
MEASURED_POSITIONS = (8, 32, 64, 128, 256, 384, 512, 768, 1000)


@dataclass(frozen=True)
class StepCost:
    """The cost of the decoding step that processes token n."""

    n: int
    cached_ms: float
    recomputed_ms: float
    cached_flops: int
    recomputed_flops: int
    cache_bytes: int


def lesson(seed: int) -> DrawFigure:
    model = GPT(GPT_CONFIG, seed=seed).eval()
    ids = torch.randint(GPT_CONFIG.vocab_size, (1, GPT_CONFIG.context_length))
    with torch.inference_mode():
        _print_equality(model, ids)
        costs = [_measure_step(model, ids, n) for n in MEASURED_POSITIONS]
    _print_step_costs(costs)
    _print_measured_and_estimated_cache_bytes(costs)
    return lambda: _draw_step_costs(costs)


def _print_equality(model: GPT, ids: Tensor) -> None:
    print_section("The same result with and without a cache")
    full_pass = model(ids[:, :64])
    cache = model.new_cache(batch=1, capacity=64)
    steps = torch.cat([model(ids[:, n : n + 1], cache=cache) for n in range(64)], dim=1)
    print_text(f"""If 64 tokens are processed one by one with a cache, the logits differ from the logits of a single
        pass by at most {max_abs_difference(full_pass, steps)}. No token attends to later tokens, so a new token does
        not change the keys and values of earlier tokens, and they can be cached.""")
    print_slide_error("""Lecture E writes k_new = W·x[:, :−1]. In Python, this slice contains every token except the
        last. The correct expression is x[:, −1:], which contains only the new token.""")


def _cache_before_token(model: GPT, ids: Tensor, n: int) -> KVCache:
    """Return a KV cache that contains the tokens before token n."""
    cache = model.new_cache(batch=1, capacity=n)
    model.hidden_states(ids[:, : n - 1], cache=cache)
    return cache


def _measure_step(model: GPT, ids: Tensor, n: int) -> StepCost:
    # A step appends to the cache, so each repetition needs a separate cache.
    caches = iter([_cache_before_token(model, ids, n) for _ in range(9)])
    last = ids[:, n - 1 : n]
    work = {mode: Workload(batch_size=1, seq_len=n, mode=mode) for mode in (Mode.DECODE, Mode.FORWARD)}
    return StepCost(
        n=n,
        cached_ms=1e3 * best_of_n_seconds(lambda: model(last, cache=next(caches)), times=9),
        recomputed_ms=1e3 * best_of_n_seconds(lambda: model(ids[:, :n]), times=5),
        cached_flops=count_flops(model.config, work[Mode.DECODE]).forward,
        recomputed_flops=count_flops(model.config, work[Mode.FORWARD]).forward,
        cache_bytes=_cache_before_token(model, ids, n).n_bytes,
    )


def _print_step_costs(costs: list[StepCost]) -> None:
    d, n_layers = GPT_CONFIG.d_model, GPT_CONFIG.n_layers
    print_section(f"The cost of step n (b = 1, d = {d}, L = {n_layers}, V = {GPT_CONFIG.vocab_size})")
    print_table(
        ["n", "FLOPs cached", "recomputed", "ratio", "ms cached", "recomputed", "ratio"],
        [(cost.n, cost.cached_flops, cost.recomputed_flops, cost.recomputed_flops / cost.cached_flops,
          cost.cached_ms, cost.recomputed_ms, cost.recomputed_ms / cost.cached_ms) for cost in costs],
        digits=2,
    )  # fmt: skip
    first, last = costs[0], costs[-1]
    slope = (last.cached_flops - first.cached_flops) // (last.n - first.n)
    fixed = first.cached_flops - slope * first.n
    print_text(f"""With the cache, step n costs {fixed:,} + {slope:,}·n FLOPs. The first number is the cost of
        multiplying by the weight matrices, O(bd²): 24d²L + 2dV =
        {24 * d * d * n_layers + 2 * d * GPT_CONFIG.vocab_size:,}.
        The second number is the cost of the scores and weighted sums per key, O(bnd) in total: 4dL =
        {4 * d * n_layers:,}. Without the cache, every step is a full pass, which costs O(bnd² + bn²d).""")
    cached = [fixed + slope * n for n in range(1, 1001)]
    recomputed = sum(n * step_flops for n, step_flops in enumerate(cached, start=1))
    print_text(f"""Generating 1,000 tokens takes {sum(cached) / 1e9:,.1f} GFLOP with the cache and
        {recomputed / 1e9:,.0f} GFLOP without the cache, which is {recomputed / sum(cached):,.0f} times as many.""")


def _print_measured_and_estimated_cache_bytes(costs: list[StepCost]) -> None:
    print_section("Size of the cache: 2·n·d·L numbers per sequence, 4 bytes each")
    width = GPT_CONFIG.d_model * GPT_CONFIG.n_layers
    print_table(
        ["n", "bytes of the cache", "2·n·d·L·4", "qkv.cost"],
        [(cost.n, cost.cache_bytes, 2 * cost.n * width * 4, cache_bytes(GPT_CONFIG, batch_size=1, seq_len=cost.n))
         for cost in costs],
    )  # fmt: skip


def _draw_step_costs(costs: list[StepCost]) -> Figure:
    figure = new_figure(width=10.0, height=4.2)
    times, counts = figure.subplots(1, 2)
    for name, color, marker in (("cached", BLUE, "o"), ("recomputed", ORANGE, "s")):
        times.plot(
            MEASURED_POSITIONS, [getattr(cost, f"{name}_ms") for cost in costs], color=color, marker=marker, label=name
        )
        counts.plot(
            MEASURED_POSITIONS, [getattr(cost, f"{name}_flops") / 1e6 for cost in costs], color=color, marker=marker
        )
    times.legend(frameon=False, loc="upper left")
    style_and_label_axes(times, title="Measured time of one step", x="position n", y="milliseconds")
    counts.set_yscale("log")
    style_and_label_axes(counts, title="FLOPs of one step", x="position n", y="million FLOPs (log scale)")
    figure.suptitle("With a cache, the cost of a step hardly grows; without a cache, the full text is recomputed")
    return figure
