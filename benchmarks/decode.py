"""Decoding with a cache on a CPU, beside peers with the same weights."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks import machine
from benchmarks.engine import Engine
from benchmarks.engines.decode_work import Work
from benchmarks.results import Report
from benchmarks.runner import Asked, Comparison, Plan, compare
from benchmarks.training_speed import CEILINGS

GPT2: dict[str, Any] = {
    "n_layers": 12, "n_heads": 12, "d_model": 768, "vocab_size": 50257, "short": 4, "long": 24,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "n_layers": 12, "n_heads": 4, "d_model": 64, "vocab_size": 1024, "short": 8, "long": 136,
}  # fmt: skip
ANY = float("inf")
"""Greedy ids of a random model part soon in lower precision; what int8 loses is tested on a trained one."""

OURS = Engine(name="qkv", module="benchmarks.engines.decode_qkv", is_ours=True)
TRANSFORMERS = Engine(name="Hugging Face generate", module="benchmarks.engines.decode_transformers")
CTRANSLATE2 = Engine(name="CTranslate2", module="benchmarks.engines.decode_ctranslate2")
# It rounds GELU and the cache to 16 bits even where weights are F32.
LLAMA_CPP = Engine(name="llama.cpp", module="benchmarks.engines.decode_llamacpp", tolerance=ANY)
IN_FLOAT32 = [OURS, TRANSFORMERS, CTRANSLATE2, LLAMA_CPP]
IN_INT8 = [
    Engine(name=f"{one.name}, int8", module=one.module, options={"int8": True}, is_ours=one.is_ours, tolerance=ANY)
    for one in (OURS, CTRANSLATE2, LLAMA_CPP)
]


def decode(asked: Asked) -> Report:
    return _measure("decode", asked, GPT2, [1], engines=IN_FLOAT32)


def decode_small(asked: Asked) -> Report:
    return _measure("decode-small", asked, SMALL, [1], engines=IN_FLOAT32)


def decode_batch(asked: Asked) -> Report:
    return _measure("decode-batch", asked, GPT2, [1, 2, 4, 8, 16], engines=IN_FLOAT32)


def decode_int8(asked: Asked) -> Report:
    return _measure("decode-int8", asked, GPT2, [1, 16], engines=[TRANSFORMERS, *IN_INT8])


def _measure(
    name: str, asked: Asked, shape: dict[str, Any], batches: Sequence[int], *, engines: list[Engine]
) -> Report:
    load, threads = machine.others_load(), asked.threads or machine.n_cores()
    rows, found = [], Comparison()
    for batch in batches:
        work = Work(**shape, batch=batch, threads=threads)
        plan = Plan(work=asdict(work), check_steps=1, time_steps=1, tolerance=0.0, threads=threads)
        found = compare(engines, plan, ceilings=CEILINGS, repeats=asked.repeats, say=asked.say)
        rows += _rows(engines, found, work)
    work = Work(**shape, batch=batches[-1], threads=threads)
    reads = found.ceilings[threads]["bytes"] if threads in found.ceilings else 0.0
    return Report(
        name=name,
        what=(
            f"One more token a text, greedy: {work.n_layers} layers, {work.n_heads} heads, width {work.d_model}, "
            f"vocabulary {work.vocab_size:,}, prompts of {work.n_prompt}, tokens {work.short + 1} to {work.long}, "
            f"{threads} thread(s); best of {asked.repeats}."
        ),
        columns=["texts", "engine", "tokens/s", "ms a step", "CPU ms a step", "ours ÷ it", "by CPU time", "of reading"],
        rows=rows,
        notes=[
            "Same weights. In float32 all ids are equal; not compared: int8, and llama.cpp, whose cache has 16 bits.",
            f"Of reading: the time to read all weights once at {reads / 1e9:.1f} GB/s, ÷ the CPU time of a step.",
            "That rate is by the clock, so that on a busy machine the share comes out too high.",
            *found.absent,
        ],
        versions=found.versions,
        load=load,
    )


def _rows(engines: list[Engine], found: Comparison, work: Work) -> list[list[str]]:
    rows = []
    for engine, best, ratios in found.timed(engines):
        n_bytes = work.n_weights * (1 if engine.options.get("int8") else 4)
        share = n_bytes / found.ceilings[work.threads]["bytes"] / best.cpu * work.threads
        times = [f"{1000 * best.wall:.2f}", f"{1000 * best.cpu:.2f}"]
        rows.append([str(work.batch), engine.name, f"{work.batch / best.wall:,.0f}", *times, *ratios, f"{share:.0%}"])
    return rows
