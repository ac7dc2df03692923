"""Benchmark the computation of sentence embeddings with all-MiniLM-L6-v2, from texts to vectors."""

from benchmarks import machine
from benchmarks.engine import Engine
from benchmarks.results import Report
from benchmarks.runner import CEILINGS, BenchmarkOptions, Comparison, ComparisonPlan, compare

N_SENTENCES = 1000
WIDTH = 384
TOLERANCE = 1e-5
"""Allowed difference per element of a unit vector. Even if all 384 elements differ by this much, the cosine is at least
1 − 2e-8."""
ENGINES = [
    Engine(name="qkv (sorted by length, 512 tokens per batch)", module="benchmarks.engines.embed_qkv", is_ours=True),
    Engine(name="qkv model, packed rows of 256", module="benchmarks.engines.embed_qkv", options={"batching": "packed"}),
    Engine(
        name="qkv model, padded, 32 per batch, unsorted",
        module="benchmarks.engines.embed_qkv",
        options={"batching": "padded"},
    ),
    *(
        Engine(
            name=f"sentence-transformers, {batch} per batch",
            module="benchmarks.engines.embed_sentence_transformers",
            options={"batch": batch},
        )
        for batch in (32, 8)
    ),
]


def embed(options: BenchmarkOptions) -> Report:
    load = machine.load_average()
    threads = options.threads or machine.available_cores()
    workload = {"sentences": N_SENTENCES, "threads": threads}
    plan = ComparisonPlan(workload=workload, check_steps=1, time_steps=1, tolerance=TOLERANCE, threads=threads)
    result = compare(ENGINES, plan, ceilings=CEILINGS, repeats=options.repeats, log=options.log)
    return Report(
        name="embed",
        description=(
            f"Embedding of {N_SENTENCES:,} sentences of mixed lengths with all-MiniLM-L6-v2 in float32, including "
            f"tokenization, with {threads} thread{'s' * (threads > 1)}; best of {options.repeats} rounds."
        ),
        columns=["engine", "sentences/s", "wall s", "CPU s", "speedup", "speedup (CPU time)"],
        rows=[
            [engine.name, f"{N_SENTENCES / best.wall:,.0f}", f"{best.wall:.2f}", f"{best.cpu:.2f}", *ratios]
            for engine, best, ratios in result.timed_engines(ENGINES)
        ],
        notes=_notes(result),
        versions=result.versions,
        load=load,
    )


def _notes(result: Comparison) -> list[str]:
    difference = result.largest_difference
    min_cosine = 1 - WIDTH * difference**2 / 2
    return [
        (
            f"The elements of the unit vectors differ by at most {difference:.1e}, so the cosine similarity with the "
            f"reference is at least {min_cosine:.9f}."
        ),
        (
            "Sentence lengths: the median is about 24 words, a tenth of the sentences have more than 70 words, and the "
            "maximum is 200 words."
        ),
        *result.absence_notes,
    ]
