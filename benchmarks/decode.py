"""Benchmark decoding with a KV cache on a CPU against other libraries that use the same weights."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks import machine
from benchmarks.engine import Engine
from benchmarks.engines.decode_workload import Workload
from benchmarks.results import Report
from benchmarks.runner import BenchmarkOptions, Comparison, ComparisonPlan, compare
from benchmarks.training_speed import CEILINGS

GPT2: dict[str, Any] = {
    "n_layers": 12,
    "n_heads": 12,
    "d_model": 768,
    "vocab_size": 50257,
    "short": 4,
    "long": 24,
}
SMALL: dict[str, Any] = {
    "n_layers": 12,
    "n_heads": 4,
    "d_model": 64,
    "vocab_size": 1024,
    "short": 8,
    "long": 136,
}
ANY_DIFFERENCE = float("inf")
"""Tolerance for engines in lower precision, whose greedy ids quickly diverge for a random model and are not compared.
The accuracy of int8 is tested with a trained model.
"""

OURS = Engine(name="qkv", module="benchmarks.engines.decode_qkv", is_ours=True)
TRANSFORMERS = Engine(name="Hugging Face generate", module="benchmarks.engines.decode_transformers")
CTRANSLATE2 = Engine(name="CTranslate2", module="benchmarks.engines.decode_ctranslate2")
# llama.cpp rounds GELU and the KV cache to 16 bits even if the weights are F32.
LLAMA_CPP = Engine(name="llama.cpp", module="benchmarks.engines.decode_llamacpp", tolerance=ANY_DIFFERENCE)
FLOAT32_ENGINES = [OURS, TRANSFORMERS, CTRANSLATE2, LLAMA_CPP]
INT8_ENGINES = [
    Engine(
        name=f"{engine.name}, int8",
        module=engine.module,
        options={"int8": True},
        is_ours=engine.is_ours,
        tolerance=ANY_DIFFERENCE,
    )
    for engine in (OURS, CTRANSLATE2, LLAMA_CPP)
]


def decode(options: BenchmarkOptions) -> Report:
    return _measure("decode", options, GPT2, [1], engines=FLOAT32_ENGINES)


def decode_small(options: BenchmarkOptions) -> Report:
    return _measure("decode-small", options, SMALL, [1], engines=FLOAT32_ENGINES)


def decode_batch(options: BenchmarkOptions) -> Report:
    return _measure("decode-batch", options, GPT2, [1, 2, 4, 8, 16], engines=FLOAT32_ENGINES)


def decode_int8(options: BenchmarkOptions) -> Report:
    return _measure("decode-int8", options, GPT2, [1, 16], engines=[TRANSFORMERS, *INT8_ENGINES])


def _measure(
    name: str, options: BenchmarkOptions, shape: dict[str, Any], batches: Sequence[int], *, engines: list[Engine]
) -> Report:
    load, threads = machine.load_average(), options.threads or machine.available_cores()
    rows, result = [], Comparison()
    for batch in batches:
        workload = Workload(**shape, batch=batch, threads=threads)
        plan = ComparisonPlan(workload=asdict(workload), check_steps=1, time_steps=1, tolerance=0.0, threads=threads)
        result = compare(engines, plan, ceilings=CEILINGS, repeats=options.repeats, log=options.log)
        rows += _rows(engines, result, workload)
    workload = Workload(**shape, batch=batches[-1], threads=threads)
    reads = result.ceilings[threads]["bytes"] if threads in result.ceilings else 0.0
    return Report(
        name=name,
        description=(
            f"Greedy decode step of a model with {workload.n_layers} layers, {workload.n_heads} heads, "
            f"width {workload.d_model} and vocabulary {workload.vocab_size:,}. The times are averages over new tokens "
            f"{workload.short + 1} to {workload.long} after prompts of {workload.n_prompt} tokens, "
            f"with {threads} thread{'s' * (threads > 1)}; best of {options.repeats} rounds."
        ),
        columns=[
            "texts",
            "engine",
            "tokens/s",
            "ms/step",
            "CPU ms/step",
            "speedup",
            "speedup (CPU time)",
            "of bandwidth",
        ],
        rows=rows,
        notes=[
            (
                "All engines use the same weights. In float32, all ids are equal. The ids of int8 engines and of "
                "llama.cpp (which uses a 16-bit cache) are not compared."
            ),
            (
                f'The column "of bandwidth" shows the time needed to read all weights once at {reads / 1e9:.1f} GB/s, '
                "divided by the CPU time of a step."
            ),
            "The bandwidth is measured in wall-clock time, so this fraction is too high on a busy machine.",
            *result.absence_notes,
        ],
        versions=result.versions,
        load=load,
    )


def _rows(engines: list[Engine], result: Comparison, workload: Workload) -> list[list[str]]:
    rows = []
    for engine, best, ratios in result.timed_engines(engines):
        n_bytes = workload.n_weights * (1 if engine.options.get("int8") else 4)
        share = n_bytes / result.ceilings[workload.threads]["bytes"] / best.cpu * workload.threads
        times = [f"{1000 * best.wall:.2f}", f"{1000 * best.cpu:.2f}"]
        rows.append(
            [str(workload.batch), engine.name, f"{workload.batch / best.wall:,.0f}", *times, *ratios, f"{share:.0%}"]
        )
    return rows
