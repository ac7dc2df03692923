"""Tokens a second of GPT-2 124M's training step on a GPU, beside nanoGPT's."""

from dataclasses import asdict
from typing import Any

from benchmarks import machine
from benchmarks.engine import Engine
from benchmarks.engines.next_token_work import Work
from benchmarks.results import Report
from benchmarks.runner import Asked, Comparison, Plan, compare
from benchmarks.training_speed import rows

CEILINGS = Engine(name="ceilings", module="benchmarks.engines.gpu_ceilings")
SHAPE: dict[str, Any] = {
    "n_layers": 12, "n_heads": 12, "d_model": 768, "vocab_size": 50304, "context_length": 1024, "bias": True,
    "batch": 32, "length": 1024,
}  # fmt: skip
"""The vocabulary is rounded up as nanoGPT does it, for its sake."""
STEPS = 20
TOLERANCE = 0.02
"""bfloat16 keeps 8 bits: losses of about 11 differ in the third digit."""
BAR = 1.15


def train_gpu(asked: Asked) -> Report:
    if asked.device != "cuda":
        raise SystemExit("train-gpu measures a GPU: add --device cuda")
    load = machine.others_load()
    work = Work(**SHAPE, threads=machine.n_cores(), device=asked.device)
    plan = Plan(work=asdict(work), check_steps=3, time_steps=STEPS, tolerance=TOLERANCE, threads=work.threads)
    peers = {"peers": None if asked.peers is None else str(asked.peers), "fused": True, "compiled": True}
    chosen = [
        Engine(name="qkv", module="benchmarks.engines.train_qkv", options={"compiled": True}, is_ours=True),
        Engine(name="nanoGPT", module="benchmarks.engines.train_nanogpt", options=peers),
    ]
    found = compare(chosen, plan, ceilings=CEILINGS, repeats=asked.repeats, say=asked.say)
    return Report(
        name="train-gpu",
        what=(
            f"A whole training step of GPT-2 124M on {machine.gpu()}, compiled, products in bfloat16, fused AdamW, "
            f"batch {work.batch} × {work.length} tokens, vocabulary {work.vocab_size:,}; "
            f"best of {asked.repeats} × {STEPS} steps."
        ),
        columns=["engine", "tokens/s", "ms a step", "CPU ms a step", "ours ÷ it", "by CPU time", "of matrix rate"],
        rows=rows(chosen, found, work, steps=STEPS),
        notes=_notes(found, work),
        versions=found.versions,
        load=load,
    )


def _notes(found: Comparison, work: Work) -> list[str]:
    rate = found.ceilings[work.threads]
    wide = 6 * work.n_weights + 12 * work.n_layers * work.d_model * work.length
    said = [
        f"Ceiling: {rate['flops'] / 1e12:.0f} TFLOP/s of bfloat16 products, {rate['bytes'] / 1e12:.2f} TB/s copied.",
        f"A token takes {work.flops_a_token / 1e6:.0f} MFLOP (6 a multiplying weight, causal attention once).",
        *(
            f"{name}: {wide * work.batch * work.length * STEPS / best.wall / rate['flops']:.0%} of the ceiling "
            "where attention is counted whole (6N + 12LdT), as is usual."
            for name, best in found.best.items()
        ),
        f"Same first weights and batches: losses of the first steps agree to {found.largest_difference:.1e}.",
        f"Bar: {BAR} of nanoGPT.",
    ]
    return said + found.absent
