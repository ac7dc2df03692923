"""Benchmark a training step of GPT-2 124M on a GPU against nanoGPT."""

from dataclasses import asdict
from typing import Any

from benchmarks import machine
from benchmarks.engine import Engine
from benchmarks.engines.next_token_workload import Workload
from benchmarks.results import Report
from benchmarks.runner import BenchmarkOptions, Comparison, ComparisonPlan, compare
from benchmarks.training_speed import rows

CEILINGS = Engine(name="ceilings", module="benchmarks.engines.gpu_ceilings")
SHAPE: dict[str, Any] = {
    "n_layers": 12,
    "n_heads": 12,
    "d_model": 768,
    "vocab_size": 50304,
    "context_length": 1024,
    "bias": True,
    "batch": 32,
    "length": 1024,
}
"""Workload with the model and the batch. The vocabulary size is padded to a multiple of 64, as in nanoGPT."""
STEPS = 20
TOLERANCE = 0.02
"""Allowed difference between losses. In bfloat16, which has 8 significant bits, losses of about 11 differ in the third
digit."""
TARGET_SPEEDUP = 1.15


def train_gpu(options: BenchmarkOptions) -> Report:
    if options.device != "cuda":
        raise SystemExit(f"train-gpu requires a GPU: expected --device cuda, got --device {options.device}")
    load = machine.load_average()
    workload = Workload(**SHAPE, threads=machine.available_cores(), device=options.device)
    plan = ComparisonPlan(
        workload=asdict(workload), check_steps=3, time_steps=STEPS, tolerance=TOLERANCE, threads=workload.threads
    )
    peers = {"peers": None if options.peers is None else str(options.peers), "fused": True, "compiled": True}
    chosen = [
        Engine(name="qkv", module="benchmarks.engines.train_qkv", options={"compile": True}, is_ours=True),
        Engine(name="nanoGPT", module="benchmarks.engines.train_nanogpt", options=peers),
    ]
    result = compare(chosen, plan, ceilings=CEILINGS, repeats=options.repeats, log=options.log)
    return Report(
        name="train-gpu",
        description=(
            f"Full training step of GPT-2 124M on {machine.gpu()}, compiled, with bfloat16 matmuls and fused AdamW: "
            f"batch {workload.batch} × {workload.length} tokens, vocabulary {workload.vocab_size:,}; "
            f"best of {options.repeats} × {STEPS} steps."
        ),
        columns=["engine", "tokens/s", "ms/step", "CPU ms/step", "speedup", "speedup (CPU time)", "of matmul peak"],
        rows=rows(chosen, result, workload, steps=STEPS),
        notes=_notes(result, workload),
        versions=result.versions,
        load=load,
    )


def _notes(result: Comparison, workload: Workload) -> list[str]:
    rate = result.ceilings[workload.threads]
    flops_per_token = 6 * workload.n_weights + 12 * workload.n_layers * workload.d_model * workload.length
    flops_per_step = flops_per_token * workload.batch * workload.length
    notes = [
        (
            f"Peak rates: {rate['flops'] / 1e12:.0f} TFLOP/s for bfloat16 matmuls, "
            f"{rate['bytes'] / 1e12:.2f} TB/s for copies."
        ),
        (
            f"FLOPs per token: {workload.flops_per_token / 1e6:.0f} M (6 per matmul weight, plus attention over the "
            "unmasked pairs)."
        ),
        *(
            f"{name}: {flops_per_step * STEPS / best.wall / rate['flops']:.0%} of the peak "
            "if all pairs of positions are counted, as is usual (6N + 12LdT FLOPs per token)."
            for name, best in result.best.items()
        ),
        (
            "Both engines use the same initial weights and batches. The losses of the first steps differ by at most "
            f"{result.largest_difference:.1e}."
        ),
        f"Target: a speedup of {TARGET_SPEEDUP} over nanoGPT.",
    ]
    return notes + result.absence_notes
