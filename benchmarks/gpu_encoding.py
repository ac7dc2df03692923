"""Texts a second through BERT-base on a GPU: all equally long, and of mixed lengths, beside transformers."""

from dataclasses import asdict
from typing import Any

from benchmarks import machine
from benchmarks.engine import Engine
from benchmarks.engines.gpu_encode_work import Work
from benchmarks.gpu_training import CEILINGS
from benchmarks.results import Report
from benchmarks.runner import Asked, Comparison, Plan, compare

SHAPE: dict[str, Any] = {"n_layers": 12, "n_heads": 12, "d_model": 768, "d_ff": 3072, "vocab_size": 30522}
WORKS: dict[str, dict[str, Any]] = {
    "64 × 128 tokens": {"texts": 64, "length": 128, "is_mixed": False},
    "256 of 1 to 128 tokens": {"texts": 256, "length": 128, "is_mixed": True},
}
BARS = {"64 × 128 tokens": 1.1, "256 of 1 to 128 tokens": 1.6}
STEPS = 30
TOLERANCE = 0.004
"""Of any number of a vector of length 1 and 768 numbers, in bfloat16: a tenth of what such a number is."""


def encode_gpu(asked: Asked) -> Report:
    if asked.device != "cuda":
        raise SystemExit("encode-gpu measures a GPU: add --device cuda")
    load = machine.others_load()
    rows, notes, versions = [], [], {}
    for name, shape in WORKS.items():
        work = Work(**SHAPE, **shape, device=asked.device)
        found, table = _measure(name, work, asked)
        rows += table
        versions |= found.versions
        rate = max(ceiling["flops"] for ceiling in found.ceilings.values())
        notes.append(
            f"{name}: vectors of length 1 agree to {found.largest_difference:.1e}; bar {BARS[name]}; "
            f"ceiling {rate / 1e12:.0f} TFLOP/s of bfloat16 products."
        )
        notes += found.absent
    return Report(
        name="encode-gpu",
        what=(
            f"The last states of BERT-base in bfloat16 on {machine.gpu()}, random weights, ids in, compiled with CUDA "
            f"graphs; best of {asked.repeats} × {STEPS} passes. Ours packs its texts inside what is timed; "
            "the others' padded batches lie ready on the GPU."
        ),
        columns=["texts", "engine", "texts/s", "ms a pass", "ours ÷ it", "of matrix rate"],
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
                name=f"transformers, {n} at once", module=peer, options={"compiled": True, "graphs": True, "batch": n}
            )
            for n in batches
        ),
    ]


def _measure(name: str, work: Work, asked: Asked) -> tuple[Comparison, list[list[str]]]:
    chosen = engines(sorted({64, work.texts}))
    plan = Plan(work=asdict(work), check_steps=1, time_steps=STEPS, tolerance=TOLERANCE, threads=machine.n_cores())
    found = compare(chosen, plan, ceilings=CEILINGS, repeats=asked.repeats, say=asked.say)
    rate = max(ceiling["flops"] for ceiling in found.ceilings.values())
    # Of tokens alone: what padding costs is no work done. 2 a weight, and the scores of all pairs.
    lengths = [len(row) for row in work.rows()]
    a_token = 2 * work.n_layers * (4 * work.d_model**2 + 2 * work.d_model * work.d_ff)
    flops = sum(n * (a_token + 4 * work.n_layers * work.d_model * n) for n in lengths)
    table = [
        [
            name,
            engine.name,
            f"{work.texts * STEPS / best.wall:,.0f}",
            f"{1000 * best.wall / STEPS:.2f}",
            ratios[0],
            f"{flops * STEPS / best.wall / rate:.0%}",
        ]
        for engine, best, ratios in found.timed(chosen)
    ]
    return found, table
