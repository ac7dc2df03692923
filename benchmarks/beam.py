"""Benchmark translation with beam search against other libraries that use the same weights."""

from dataclasses import asdict
from typing import Any

from benchmarks import machine
from benchmarks.engine import Engine
from benchmarks.engines.beam_workload import Workload
from benchmarks.results import Report
from benchmarks.runner import CEILINGS, BenchmarkOptions, ComparisonPlan, compare

SHAPE: dict[str, Any] = {
    "n_encoder_layers": 6,
    "n_decoder_layers": 4,
    "n_heads": 8,
    "d_model": 256,
    "vocab_size": 8000,
    "source_length": 32,
    "length": 64,
    "n_beams": 5,
}


def engines(options: BenchmarkOptions) -> list[Engine]:
    peer_options = {"peers": None if options.peers is None else str(options.peers)}
    return [
        Engine(name="qkv", module="benchmarks.engines.beam_qkv", is_ours=True),
        Engine(name="Hugging Face generate", module="benchmarks.engines.beam_transformers"),
        Engine(name="JoeyNMT", module="benchmarks.engines.beam_joeynmt", options=peer_options),
    ]


def beam_single(options: BenchmarkOptions) -> Report:
    return _measure("beam", options, batch=1)


def beam_batch(options: BenchmarkOptions) -> Report:
    return _measure("beam-batch", options, batch=16)


def _measure(name: str, options: BenchmarkOptions, *, batch: int) -> Report:
    load = machine.load_average()
    workload = Workload(**SHAPE, batch=batch, threads=options.threads or machine.available_cores())
    plan = ComparisonPlan(
        workload=asdict(workload), check_steps=2, time_steps=1, tolerance=0.0, threads=workload.threads
    )
    chosen = engines(options)
    result = compare(chosen, plan, ceilings=CEILINGS, repeats=options.repeats, log=options.log)
    rows = []
    for engine, best, ratios in result.timed_engines(chosen):
        milliseconds = [f"{1000 * part / workload.length:.2f}" for part in (best.wall, best.cpu)]
        rows.append([engine.name, f"{workload.batch * workload.length / best.wall:,.0f}", *milliseconds, *ratios])
    return Report(
        name=name,
        description=(
            f"Beam search with {workload.n_beams} beams in float32: "
            f"{workload.n_encoder_layers} + {workload.n_decoder_layers} layers, "
            f"width {workload.d_model}, vocabulary {workload.vocab_size:,}, "
            f"{workload.batch} × {workload.source_length} source tokens, "
            f"{workload.length} target tokens, {workload.threads} thread{'s' * (workload.threads > 1)}; "
            f"best of {options.repeats} rounds."
        ),
        columns=["engine", "tokens/s", "ms/step", "CPU ms/step", "speedup", "speedup (CPU time)"],
        rows=rows,
        notes=[
            (
                "All engines use the same weights. The ids of the best translations are equal, both with the timed "
                "settings and with no_repeat_ngram_size=2."
            ),
            *result.absence_notes,
        ],
        versions=result.versions,
        load=load,
    )
