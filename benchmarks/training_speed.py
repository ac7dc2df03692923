"""Benchmark a full training step on a CPU: loss, gradients, clipping and AdamW."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.engine import Engine
from benchmarks.engines.next_token_workload import Workload
from benchmarks.results import Report
from benchmarks.runner import CEILINGS, BenchmarkOptions, Comparison, ComparisonPlan, compare

SMALL: dict[str, Any] = {
    "n_layers": 4,
    "n_heads": 4,
    "d_model": 128,
    "vocab_size": 65,
    "context_length": 64,
    "bias": False,
    "batch": 12,
    "length": 64,
}
"""Workload of nanoGPT's CPU example."""
GPT2: dict[str, Any] = {
    "n_layers": 12,
    "n_heads": 12,
    "d_model": 768,
    "vocab_size": 50257,
    "context_length": 1024,
    "bias": True,
    "batch": 2,
    "length": 128,
}

BF16_TOLERANCE = 0.02
"""Allowed difference between losses. In bfloat16, which has 8 significant bits, losses of about 10 differ in the third
digit."""


def engines(peers: Path | None) -> list[Engine]:
    """List every engine with its best settings in float32, and include two additional variants.

    The variants are nanoGPT with its default AdamW and qkv in bfloat16.
    """
    peer_options = {"peers": None if peers is None else str(peers)}
    ours, nanogpt, hugging_face = (f"benchmarks.engines.train_{name}" for name in ("qkv", "nanogpt", "transformers"))
    return [
        Engine(name="qkv", module=ours, is_ours=True),
        Engine(name="qkv, compiled", module=ours, options={"compile": True}, is_ours=True),
        Engine(
            name=f"qkv, bf16 (losses to {BF16_TOLERANCE})",
            module=ours,
            options={"precision": "bf16"},
            tolerance=BF16_TOLERANCE,
        ),
        Engine(name="nanoGPT", module=nanogpt, options=peer_options),
        Engine(name="nanoGPT, fused AdamW", module=nanogpt, options={**peer_options, "fused": True}),
        Engine(
            name="nanoGPT, fused, compiled", module=nanogpt, options={**peer_options, "fused": True, "compiled": True}
        ),
        Engine(name="Hugging Face", module=hugging_face),
        Engine(name="Hugging Face, compiled", module=hugging_face, options={"compiled": True}),
    ]


def train_small(options: BenchmarkOptions) -> Report:
    return _measure("train-small", SMALL, options, steps=20)


def train_124m(options: BenchmarkOptions) -> Report:
    return _measure("train-124m", GPT2, options, steps=2)


def _measure(name: str, shape: dict[str, Any], options: BenchmarkOptions, *, steps: int) -> Report:
    load = machine.load_average()
    workload = Workload(**shape, threads=options.threads or machine.available_cores())
    plan = ComparisonPlan(
        workload=asdict(workload), check_steps=3, time_steps=steps, tolerance=1e-4, threads=workload.threads
    )
    chosen = engines(options.peers)
    result = compare(chosen, plan, ceilings=CEILINGS, repeats=options.repeats, log=options.log)
    description = (
        f"Full training step, in float32 unless stated otherwise: {workload.n_layers} layers, {workload.n_heads} "
        f"heads, width {workload.d_model}, vocabulary {workload.vocab_size:,}, "
        f"batch {workload.batch} × {workload.length} tokens, "
        f"{_format_threads(workload.threads)}; best of {options.repeats} × {steps} steps."
    )
    return Report(
        name=name,
        description=description,
        columns=["engine", "tokens/s", "ms/step", "CPU ms/step", "speedup", "speedup (CPU time)", "of matmul peak"],
        rows=rows(chosen, result, workload, steps=steps),
        notes=notes(result, workload),
        versions=result.versions,
        load=load,
    )


def rows(chosen: list[Engine], result: Comparison, workload: Workload, *, steps: int) -> list[list[str]]:
    """Build the table rows of the engines that ran."""
    table = []
    for engine, best, ratios in result.timed_engines(chosen):
        tokens_per_second = workload.batch * workload.length * steps / best.wall
        share = tokens_per_second * workload.flops_per_token / result.ceilings[workload.threads]["flops"]
        milliseconds = [f"{1000 * seconds / steps:.1f}" for seconds in (best.wall, best.cpu)]
        table.append([engine.name, f"{tokens_per_second:,.0f}", *milliseconds, *ratios, f"{share:.0%}"])
    return table


def notes(result: Comparison, workload: Workload) -> list[str]:
    notes = [
        f"Peak rates with {_format_threads(threads)}: {rate['flops'] / 1e9:.0f} GFLOP/s for matmuls, "
        f"{rate['bytes'] / 1e9:.1f} GB/s for memory reads."
        for threads, rate in sorted(result.ceilings.items())
    ]
    notes.append(
        f"FLOPs per token: {workload.flops_per_token / 1e6:.2f} M (6 per matmul weight, plus attention over the "
        "unmasked pairs)."
    )
    notes.append(
        "All engines use the same initial weights and batches. In float32, the losses of the first steps differ by at "
        f"most {result.largest_difference:.1e}."
    )
    return notes + result.absence_notes


def _format_threads(n: int) -> str:
    return "1 thread" if n == 1 else f"{n} threads"
