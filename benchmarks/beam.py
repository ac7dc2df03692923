"""Translation by beam search, beside a peer with the same weights."""

from dataclasses import asdict
from typing import Any

from benchmarks import machine
from benchmarks.engine import Engine
from benchmarks.engines.beam_work import Work
from benchmarks.results import Report
from benchmarks.runner import CEILINGS, Asked, Plan, compare

SHAPE: dict[str, Any] = {
    "n_encoder_layers": 6, "n_decoder_layers": 4, "n_heads": 8, "d_model": 256, "vocab_size": 8000,
    "source_length": 32, "length": 64, "n_beams": 5,
}  # fmt: skip


def engines(asked: Asked) -> list[Engine]:
    joey = {"peers": None if asked.peers is None else str(asked.peers)}
    return [
        Engine(name="qkv", module="benchmarks.engines.beam_qkv", is_ours=True),
        Engine(name="Hugging Face generate", module="benchmarks.engines.beam_transformers"),
        Engine(name="JoeyNMT", module="benchmarks.engines.beam_joeynmt", options=joey),
    ]


def beam_alone(asked: Asked) -> Report:
    return _measure("beam", asked, batch=1)


def beam_batch(asked: Asked) -> Report:
    return _measure("beam-batch", asked, batch=16)


def _measure(name: str, asked: Asked, *, batch: int) -> Report:
    load = machine.others_load()
    work = Work(**SHAPE, batch=batch, threads=asked.threads or machine.n_cores())
    plan = Plan(work=asdict(work), check_steps=2, time_steps=1, tolerance=0.0, threads=work.threads)
    chosen = engines(asked)
    found = compare(chosen, plan, ceilings=CEILINGS, repeats=asked.repeats, say=asked.say)
    rows = []
    for engine, best, ratios in found.timed(chosen):
        milliseconds = [f"{1000 * part / work.length:.2f}" for part in (best.wall, best.cpu)]
        rows.append([engine.name, f"{work.batch * work.length / best.wall:,.0f}", *milliseconds, *ratios])
    return Report(
        name=name,
        what=(
            f"Beam {work.n_beams} in float32, {work.n_encoder_layers} + {work.n_decoder_layers} layers, width "
            f"{work.d_model}, vocabulary {work.vocab_size:,}, {work.batch} × {work.source_length} source tokens, "
            f"{work.length} tokens out, {work.threads} thread(s); best of {asked.repeats}."
        ),
        columns=["engine", "tokens/s", "ms a step", "CPU ms a step", "ours ÷ it", "by CPU time"],
        rows=rows,
        notes=[
            "Same weights; the ids of the best texts are equal, as timed and with no_repeat_ngram 2.",
            *found.absent,
        ],
        versions=found.versions,
        load=load,
    )
