"""Tiny Shakespeare by characters on a CPU: who has the lower validation loss after the same CPU seconds."""

import os
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.engine import ROOT, Engine, EngineError, MissingEngineError, Running
from benchmarks.results import Report
from benchmarks.runner import Asked

TEXT = Path("shakespeare") / "input.txt"
THREADS = 1
"""Unless said. With more, threads that wait for each other count as CPU time, the more so the busier the machine."""
CPU_SECONDS = 150.0
"""For ours, where there is no nanoGPT to say how long."""
PUBLISHED = 1.88
"""nanoGPT's README, for this line."""


def shakespeare_cpu(asked: Asked) -> Report:
    """Repeats are seeds of ours; nanoGPT's is fixed in its code."""
    threads = asked.threads or THREADS
    load, work = machine.others_load(), {"text": str(find_text())}
    options = {"peers": None if asked.peers is None else str(asked.peers)}
    theirs = Engine(name="nanoGPT", module="benchmarks.engines.shakespeare_nanogpt", options=options)
    ours = Engine(name="qkv", module="benchmarks.engines.shakespeare_qkv", is_ours=True)
    rows, notes, versions, seconds = [], [], {}, CPU_SECONDS
    for engine, seed in [(theirs, 0), *((ours, seed) for seed in range(asked.repeats))]:
        asked.say(f"{engine.name} trains …")
        try:
            trained = _train(engine, work, {"cpu_seconds": seconds, "seed": seed}, threads=threads)
        except MissingEngineError as missing:
            notes.append(f"Not here: {engine.name}: {missing}. Ours had {CPU_SECONDS:.0f} CPU seconds.")
            continue
        except EngineError as failed:
            notes.append(f"Failed: {engine.name}: {failed}.")
            continue
        if not engine.is_ours:
            seconds = trained["cpu"]
        versions |= trained["versions"]
        name = f"{engine.name}, seed {seed}" if engine.is_ours else engine.name
        rows.append(_row(name, trained))
        asked.say(f"{name}: {trained['output'][0]:.4f} after {trained['cpu']:.0f} CPU s")
    return Report(
        name="shakespeare-cpu",
        what="Tiny Shakespeare by characters, 4 layers, width 128, context 64: nanoGPT by its README's line for a CPU "
        f"(it reports {PUBLISHED}), ours by recipes/shakespeare-char-cpu.toml for the same CPU seconds.",
        columns=["engine", "validation loss", "CPU s", "wall s", "steps", "parameters"],
        rows=rows,
        notes=[*notes, f"Threads: {threads}.", *REMARKS],
        versions=versions,
        load=load,
    )


REMARKS = [
    "Loss: nats a character over the whole last tenth of the text, windows of 64 that do not overlap, the same code.",
    "CPU s: user and system time of the whole command, start-up to saving: the fair clock.",
    "On a machine shared with others wall time says how busy they were.",
    "Ours is given 97 % of nanoGPT's seconds, by two short trial runs that say what a step takes.",
]


def find_text() -> Path:
    """`$QKV_DATA`, or the data folder beside the repository."""
    folders = [Path(os.environ["QKV_DATA"])] if "QKV_DATA" in os.environ else [ROOT.parent / "shared" / "data"]
    for folder in folders:
        if (folder / TEXT).is_file():
            return (folder / TEXT).resolve()
    raise SystemExit(f"{TEXT}: not found; set QKV_DATA to the folder that holds it")


def _train(engine: Engine, work: dict[str, Any], question: dict[str, Any], *, threads: int) -> dict[str, Any]:
    with Running(engine.command, threads=threads) as process:
        described = process.ask("describe", work=work, options=engine.options)
        taken = process.ask("time", **question)
        return {**described, **taken, **process.ask("check")}


def _row(name: str, trained: dict[str, Any]) -> list[str]:
    return [
        name,
        f"{trained['output'][0]:.4f}",
        f"{trained['cpu']:.0f}",
        f"{trained['wall']:.0f}",
        f"{trained['steps']:,}",
        f"{trained['parameters']:,}",
    ]
