"""Benchmark decoding on a GPU against gpt-fast and Hugging Face, using the same weights."""

from dataclasses import asdict, replace

from benchmarks import machine
from benchmarks.engine import Engine
from benchmarks.engines.gpu_decode_workload import N_CHECKED_TOKENS, Workload
from benchmarks.gpu_training import CEILINGS
from benchmarks.results import Report
from benchmarks.runner import BenchmarkOptions, Comparison, ComparisonPlan, compare

GPT2 = Workload(n_layers=12, n_heads=12, d_model=768, d_ff=3072, vocab_size=50257, is_llama=False, batch=1)
LLAMA = replace(GPT2, d_ff=2048, is_llama=True)
"""Workload for a model with as many weights as GPT-2 124M and the architecture that gpt-fast supports."""
LARGE = replace(LLAMA, n_layers=24, n_heads=16, d_model=2048, d_ff=5632, vocab_size=32000)
OURS = Engine(name="qkv", module="benchmarks.engines.gpu_decode_qkv", is_ours=True)
TRANSFORMERS = Engine(name="Hugging Face, static cache", module="benchmarks.engines.gpu_decode_transformers")


def decode_gpu(options: BenchmarkOptions) -> Report:
    if options.device != "cuda":
        raise SystemExit(f"decode-gpu requires a GPU: expected --device cuda, got --device {options.device}")
    gptfast = Engine(
        name="gpt-fast",
        module="benchmarks.engines.gpu_decode_gptfast",
        options={"peers": None if options.peers is None else str(options.peers)},
    )
    load = machine.load_average()
    rows, versions, absence_notes = [], {}, []
    for name, workload, engines in (
        ("Llama-like 124M", LLAMA, [OURS, gptfast]),
        ("Llama-like 124M", replace(LLAMA, batch=64), [OURS, gptfast]),
        ("Llama-like 1.3B", LARGE, [OURS]),
        ("GPT-2 124M", GPT2, [OURS, TRANSFORMERS]),
    ):
        plan = ComparisonPlan(workload=asdict(workload), check_steps=1, time_steps=2, tolerance=0.0, threads=4)
        result = compare(engines, plan, ceilings=CEILINGS, repeats=options.repeats, log=options.log)
        rows += _rows(name, engines, result, workload)
        versions |= result.versions
        absence_notes += result.absence_notes
    return Report(
        name="decode-gpu",
        description=(
            "Greedy decode step on a GPU in bfloat16. The times are averages over new tokens "
            f"{GPT2.short + 1} to {GPT2.long} after prompts of {GPT2.n_prompt} tokens; best of "
            f"{options.repeats} rounds."
        ),
        columns=["model", "texts", "engine", "tokens/s", "ms/step", "speedup", "of bandwidth"],
        rows=rows,
        notes=[
            f"All engines use the same weights. In float32, the first {N_CHECKED_TOKENS} ids are equal.",
            (
                'The column "of bandwidth" shows the time needed to read all weights once at the copy rate of this '
                "GPU, divided by the time of a step."
            ),
            *dict.fromkeys(absence_notes),
        ],
        versions=versions,
        load=load,
    )


def _rows(name: str, engines: list[Engine], result: Comparison, workload: Workload) -> list[list[str]]:
    rows = []
    for engine, best, (ratio, _) in result.timed_engines(engines):
        share = 2 * workload.n_weights / result.ceilings[4]["bytes"] / best.wall
        cells = [f"{workload.batch / best.wall:,.0f}", f"{1000 * best.wall:.3f}", ratio, f"{share:.0%}"]
        rows.append([name, str(workload.batch), engine.name, *cells])
    return rows
