"""Tokens a second of a whole training step: loss, gradients, clipping, AdamW."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.engine import Engine
from benchmarks.engines.next_token_work import Work
from benchmarks.results import Report
from benchmarks.runner import CEILINGS, Asked, Comparison, Plan, compare

SMALL: dict[str, Any] = {
    "n_layers": 4, "n_heads": 4, "d_model": 128, "vocab_size": 65, "context_length": 64, "bias": False,
    "batch": 12, "length": 64,
}  # fmt: skip
"""nanoGPT's own example for a CPU."""
GPT2: dict[str, Any] = {
    "n_layers": 12, "n_heads": 12, "d_model": 768, "vocab_size": 50257, "context_length": 1024, "bias": True,
    "batch": 2, "length": 128,
}  # fmt: skip

BF16_LOSS = 0.02
"""bfloat16 keeps 8 bits: losses of about 10 differ in the third digit."""


def engines(peers: Path | None) -> list[Engine]:
    """Every engine at its best setting in float32; nanoGPT also at its own (AdamW not fused), ours also in bfloat16."""
    of_peers = {"peers": None if peers is None else str(peers)}
    ours, nanogpt, hugging_face = (f"benchmarks.engines.train_{name}" for name in ("qkv", "nanogpt", "transformers"))
    return [
        Engine(name="qkv", module=ours, is_ours=True),
        Engine(name="qkv, compiled", module=ours, options={"compiled": True}, is_ours=True),
        Engine(
            name=f"qkv, bf16 (losses to {BF16_LOSS})", module=ours, options={"precision": "bf16"}, tolerance=BF16_LOSS
        ),
        Engine(name="nanoGPT", module=nanogpt, options=of_peers),
        Engine(name="nanoGPT, fused AdamW", module=nanogpt, options={**of_peers, "fused": True}),
        Engine(name="nanoGPT, fused, compiled", module=nanogpt, options={**of_peers, "fused": True, "compiled": True}),
        Engine(name="Hugging Face", module=hugging_face),
        Engine(name="Hugging Face, compiled", module=hugging_face, options={"compiled": True}),
    ]


def train_small(asked: Asked) -> Report:
    return _measure("train-small", SMALL, asked, steps=20)


def train_124m(asked: Asked) -> Report:
    return _measure("train-124m", GPT2, asked, steps=2)


def _measure(name: str, shape: dict[str, Any], asked: Asked, *, steps: int) -> Report:
    load = machine.others_load()
    work = Work(**shape, threads=asked.threads or machine.n_cores())
    plan = Plan(work=asdict(work), check_steps=3, time_steps=steps, tolerance=1e-4, threads=work.threads)
    chosen = engines(asked.peers)
    found = compare(chosen, plan, ceilings=CEILINGS, repeats=asked.repeats, say=asked.say)
    what = (
        f"A whole training step, float32 unless said: {work.n_layers} layers, {work.n_heads} heads, "
        f"width {work.d_model}, vocabulary {work.vocab_size:,}, batch {work.batch} × {work.length} tokens, "
        f"{_threads(work.threads)}; best of {asked.repeats} × {steps} steps."
    )
    return Report(
        name=name,
        what=what,
        columns=["engine", "tokens/s", "ms a step", "CPU ms a step", "ours ÷ it", "by CPU time", "of matrix rate"],
        rows=rows(chosen, found, work, steps=steps),
        notes=notes(found, work),
        versions=found.versions,
        load=load,
    )


def rows(chosen: list[Engine], found: Comparison, work: Work, *, steps: int) -> list[list[str]]:
    """`ours ÷ it`: our best tokens/s over this engine's."""
    table = []
    for engine, best, ratios in found.timed(chosen):
        tokens_a_second = work.batch * work.length * steps / best.wall
        share = tokens_a_second * work.flops_a_token / found.ceilings[work.threads]["flops"]
        milliseconds = [f"{1000 * seconds / steps:.1f}" for seconds in (best.wall, best.cpu)]
        table.append([engine.name, f"{tokens_a_second:,.0f}", *milliseconds, *ratios, f"{share:.0%}"])
    return table


def notes(found: Comparison, work: Work) -> list[str]:
    said = [
        f"Ceiling, {_threads(threads)}: {rate['flops'] / 1e9:.0f} GFLOP/s of matrix products, "
        f"{rate['bytes'] / 1e9:.1f} GB/s read."
        for threads, rate in sorted(found.ceilings.items())
    ]
    said.append(f"A token takes {work.flops_a_token / 1e6:.2f} MFLOP (6 a multiplying weight, causal attention once).")
    said.append(f"Same first weights and batches: losses of the first steps agree to {found.largest_difference:.1e}.")
    return said + found.absent


def _threads(n: int) -> str:
    return "1 thread" if n == 1 else f"{n} threads"
