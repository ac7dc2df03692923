"""Benchmark BERT-base on a GPU against transformers, with equal and with mixed text lengths."""

from dataclasses import asdict
from typing import Any

from benchmarks import machine
from benchmarks.engine import Engine
from benchmarks.engines.gpu_encode_workload import Workload
from benchmarks.gpu_training import CEILINGS
from benchmarks.results import Report
from benchmarks.runner import BenchmarkOptions, Comparison, ComparisonPlan, compare

SHAPE: dict[str, Any] = {"n_layers": 12, "n_heads": 12, "d_model": 768, "d_ff": 3072, "vocab_size": 30522}
WORKLOADS: dict[str, dict[str, Any]] = {
    "64 × 128 tokens": {"texts": 64, "length": 128, "is_mixed": False},
    "256 of 1 to 128 tokens": {"texts": 256, "length": 128, "is_mixed": True},
}
TARGETS = {"64 × 128 tokens": 1.1, "256 of 1 to 128 tokens": 1.6}
STEPS = 30
TOLERANCE = 0.004
"""Allowed difference per element of a unit vector with 768 elements in bfloat16. It is a tenth of a typical element."""


def encode_gpu(options: BenchmarkOptions) -> Report:
    if options.device != "cuda":
        raise SystemExit(f"encode-gpu requires a GPU: expected --device cuda, got --device {options.device}")
    load = machine.load_average()
    rows, notes, versions = [], [], {}
    for name, shape in WORKLOADS.items():
        workload = Workload(**SHAPE, **shape, device=options.device)
        result, table = _measure(name, workload, options)
        rows += table
        versions |= result.versions
        rate = max(ceiling["flops"] for ceiling in result.ceilings.values())
        notes.append(
            f"{name}: the elements of the unit vectors differ by at most {result.largest_difference:.1e}. The target "
            f"speedup is {TARGETS[name]}. The peak rate is {rate / 1e12:.0f} TFLOP/s for bfloat16 matmuls."
        )
        notes += result.absence_notes
    return Report(
        name="encode-gpu",
        description=(
            "Computation of the last hidden states of BERT-base from token ids, in bfloat16 with random weights on "
            f"{machine.gpu()}, compiled with CUDA graphs; best of {options.repeats} × {STEPS} passes. The time of qkv "
            "includes packing the texts, whereas the padded batches of the other engines are already on the GPU."
        ),
        columns=["texts", "engine", "texts/s", "ms/pass", "speedup", "of matmul peak"],
        rows=rows,
        notes=notes,
        versions=versions,
        load=load,
    )


def engines(batches: list[int]) -> list[Engine]:
    peer = "benchmarks.engines.gpu_encode_transformers"
    return [
        Engine(name="qkv", module="benchmarks.engines.gpu_encode_qkv", options={"compiled": True}, is_ours=True),
        *(
            Engine(
                name=f"transformers, {n} per batch", module=peer, options={"compiled": True, "graphs": True, "batch": n}
            )
            for n in batches
        ),
    ]


def _measure(name: str, workload: Workload, options: BenchmarkOptions) -> tuple[Comparison, list[list[str]]]:
    chosen = engines(sorted({64, workload.texts}))
    plan = ComparisonPlan(
        workload=asdict(workload),
        check_steps=1,
        time_steps=STEPS,
        tolerance=TOLERANCE,
        threads=machine.available_cores(),
    )
    result = compare(chosen, plan, ceilings=CEILINGS, repeats=options.repeats, log=options.log)
    rate = max(ceiling["flops"] for ceiling in result.ceilings.values())
    # Only tokens count, not padding. Each token takes 2 FLOPs per weight, plus the FLOPs of the scores of all pairs.
    lengths = [len(row) for row in workload.rows()]
    flops_per_token = 2 * workload.n_layers * (4 * workload.d_model**2 + 2 * workload.d_model * workload.d_ff)
    flops = sum(n * (flops_per_token + 4 * workload.n_layers * workload.d_model * n) for n in lengths)
    table = [
        [
            name,
            engine.name,
            f"{workload.texts * STEPS / best.wall:,.0f}",
            f"{1000 * best.wall / STEPS:.2f}",
            ratios[0],
            f"{flops * STEPS / best.wall / rate:.0%}",
        ]
        for engine, best, ratios in result.timed_engines(chosen)
    ]
    return result, table
