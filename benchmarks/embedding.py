"""Sentences a second of one and the same model, all-MiniLM-L6-v2: text in, vectors out."""

from benchmarks import machine
from benchmarks.engine import Engine
from benchmarks.results import Report
from benchmarks.runner import CEILINGS, Asked, Comparison, Plan, compare

N_SENTENCES = 1000
WIDTH = 384
TOLERANCE = 1e-5
"""Of any number of a vector of length 1; 384 of them so far off still leave a cosine of 1 − 2e-8."""
ENGINES = [
    Engine(name="qkv (like lengths, 512 tokens at once)", module="benchmarks.engines.embed_qkv", is_ours=True),
    Engine(name="qkv's model, packed rows of 256", module="benchmarks.engines.embed_qkv", options={"way": "packed"}),
    Engine(
        name="qkv's model, padded, 32 as they come", module="benchmarks.engines.embed_qkv", options={"way": "padded"}
    ),
    *(
        Engine(
            name=f"sentence-transformers, {batch} at once",
            module="benchmarks.engines.embed_sentence_transformers",
            options={"batch": batch},
        )
        for batch in (32, 8)
    ),
]


def embed(asked: Asked) -> Report:
    load = machine.others_load()
    threads = asked.threads or machine.n_cores()
    work = {"sentences": N_SENTENCES, "threads": threads}
    plan = Plan(work=work, check_steps=1, time_steps=1, tolerance=TOLERANCE, threads=threads)
    found = compare(ENGINES, plan, ceilings=CEILINGS, repeats=asked.repeats, say=asked.say)
    return Report(
        name="embed",
        what=(
            f"{N_SENTENCES:,} sentences of mixed lengths to vectors by all-MiniLM-L6-v2 in float32, "
            f"tokenizing included, threads: {threads}; best of {asked.repeats}."
        ),
        columns=["engine", "sentences/s", "wall s", "CPU s", "ours ÷ it", "by CPU time"],
        rows=[
            [engine.name, f"{N_SENTENCES / best.wall:,.0f}", f"{best.wall:.2f}", f"{best.cpu:.2f}", *ratios]
            for engine, best, ratios in found.timed(ENGINES)
        ],
        notes=_notes(found),
        versions=found.versions,
        load=load,
    )


def _notes(found: Comparison) -> list[str]:
    apart = found.largest_difference
    least = 1 - WIDTH * apart**2 / 2
    return [
        f"Vectors of length 1 agree to {apart:.1e} in every number, so every cosine is at least {least:.9f}.",
        "Lengths: median about 24 words, a tenth beyond 70, the longest 200.",
        *found.absent,
    ]
