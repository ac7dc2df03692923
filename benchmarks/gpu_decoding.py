"""Decoding on a GPU, beside gpt-fast and Hugging Face with the same weights."""

from dataclasses import asdict, replace

from benchmarks import machine
from benchmarks.engine import Engine
from benchmarks.engines.gpu_decode_work import CHECKED, Work
from benchmarks.gpu_training import CEILINGS
from benchmarks.results import Report
from benchmarks.runner import Asked, Comparison, Plan, compare

GPT2 = Work(n_layers=12, n_heads=12, d_model=768, d_ff=3072, vocab_size=50257, is_llama=False, batch=1)
LLAMA = replace(GPT2, d_ff=2048, is_llama=True)
"""As many weights as GPT-2 124M, in the form that gpt-fast knows."""
LARGE = replace(LLAMA, n_layers=24, n_heads=16, d_model=2048, d_ff=5632, vocab_size=32000)
OURS = Engine(name="qkv", module="benchmarks.engines.gpu_decode_qkv", is_ours=True)
TRANSFORMERS = Engine(name="Hugging Face, static cache", module="benchmarks.engines.gpu_decode_transformers")


def decode_gpu(asked: Asked) -> Report:
    if asked.device != "cuda":
        raise SystemExit("decode-gpu measures a GPU: add --device cuda")
    gptfast = Engine(
        name="gpt-fast", module="benchmarks.engines.gpu_decode_gptfast",
        options={"peers": None if asked.peers is None else str(asked.peers)},
    )  # fmt: skip
    load = machine.others_load()
    rows, versions, absent = [], {}, []
    for name, work, engines in (
        ("Llama-like 124M", LLAMA, [OURS, gptfast]),
        ("Llama-like 124M", replace(LLAMA, batch=64), [OURS, gptfast]),
        ("Llama-like 1.3B", LARGE, [OURS]),
        ("GPT-2 124M", GPT2, [OURS, TRANSFORMERS]),
    ):
        plan = Plan(work=asdict(work), check_steps=1, time_steps=2, tolerance=0.0, threads=4)
        found = compare(engines, plan, ceilings=CEILINGS, repeats=asked.repeats, say=asked.say)
        rows += _rows(name, engines, found, work)
        versions |= found.versions
        absent += found.absent
    return Report(
        name="decode-gpu",
        what=(
            f"One more token a text on a GPU, greedy, bfloat16, prompts of {GPT2.n_prompt}, tokens {GPT2.short + 1} to "
            f"{GPT2.long}; best of {asked.repeats}."
        ),
        columns=["model", "texts", "engine", "tokens/s", "ms a step", "ours ÷ it", "of reading"],
        rows=rows,
        notes=[
            f"Same weights; in float32 the first {CHECKED} ids are equal.",
            "Of reading: the time to read all weights once at the rate of a copy on this GPU, ÷ the time of a step.",
            *dict.fromkeys(absent),
        ],
        versions=versions,
        load=load,
    )


def _rows(name: str, engines: list[Engine], found: Comparison, work: Work) -> list[list[str]]:
    rows = []
    for engine, best, (ratio, _) in found.timed(engines):
        share = 2 * work.n_weights / found.ceilings[4]["bytes"] / best.wall
        cells = [f"{work.batch / best.wall:,.0f}", f"{1000 * best.wall:.3f}", ratio, f"{share:.0%}"]
        rows.append([name, str(work.batch), engine.name, *cells])
    return rows
