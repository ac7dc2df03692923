"""Compare the validation losses of character models trained on Tiny Shakespeare for the same CPU time."""

import os
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.engine import ROOT, Engine, EngineError, EngineProcess, MissingEngineError
from benchmarks.results import Report
from benchmarks.runner import BenchmarkOptions

TEXT = Path("shakespeare") / "input.txt"
THREADS = 1
"""Default number of threads. With more threads, waiting would count as CPU time, especially on a busy machine."""
CPU_SECONDS = 150.0
"""CPU time in seconds for training qkv if nanoGPT is not installed."""
PUBLISHED = 1.88
"""Loss that nanoGPT's README reports for these settings."""


def shakespeare_cpu(options: BenchmarkOptions) -> Report:
    """Train with nanoGPT and qkv and compare the losses.

    Each repeat trains qkv with a different seed, whereas nanoGPT always uses the same seed.
    """
    threads = options.threads or THREADS
    load, workload = machine.load_average(), {"text": str(find_text())}
    peer_options = {"peers": None if options.peers is None else str(options.peers)}
    theirs = Engine(name="nanoGPT", module="benchmarks.engines.shakespeare_nanogpt", options=peer_options)
    ours = Engine(name="qkv", module="benchmarks.engines.shakespeare_qkv", is_ours=True)
    rows, notes, versions, seconds = [], [], {}, CPU_SECONDS
    for engine, seed in [(theirs, 0), *((ours, seed) for seed in range(options.repeats))]:
        options.log(f"training {engine.name} …")
        try:
            trained = _train(engine, workload, {"cpu_seconds": seconds, "seed": seed}, threads=threads)
        except MissingEngineError as missing:
            notes.append(f"Not installed: {engine.name}: {missing}. qkv was given {CPU_SECONDS:.0f} CPU seconds.")
            continue
        except EngineError as failed:
            notes.append(f"Failed: {engine.name}: {failed}.")
            continue
        if not engine.is_ours:
            seconds = trained["cpu"]
        versions |= trained["versions"]
        name = f"{engine.name}, seed {seed}" if engine.is_ours else engine.name
        rows.append(_row(name, trained))
        options.log(f"{name}: {trained['output'][0]:.4f} after {trained['cpu']:.0f} CPU s")
    return Report(
        name="shakespeare-cpu",
        description=(
            "Character models on Tiny Shakespeare with 4 layers, d_model=128 and a context of 64 characters. nanoGPT "
            f"uses the CPU settings of its README (which reports a loss of {PUBLISHED}). qkv uses "
            "recipes/shakespeare-char-cpu.toml and is trained for the same CPU time."
        ),
        columns=["engine", "validation loss", "CPU s", "wall s", "steps", "parameters"],
        rows=rows,
        notes=[*notes, f"Threads: {threads}.", *NOTES],
        versions=versions,
        load=load,
    )


NOTES = [
    (
        "Loss: nats per character over the last tenth of the text, computed by the same code for both engines in "
        "non-overlapping windows of 64 characters."
    ),
    (
        "CPU s: user and system time of the full command, from start-up to saving. CPU time is the fairest measure "
        "because, on a shared machine, wall time depends on the load of other processes."
    ),
    (
        "The training of qkv is planned to take 97 % of the CPU seconds of nanoGPT. Two short trial runs determine the "
        "number of steps."
    ),
]


def find_text() -> Path:
    """Find the text in `$QKV_DATA` or in the data folder next to the repository."""
    folders = [Path(os.environ["QKV_DATA"])] if "QKV_DATA" in os.environ else [ROOT.parent / "shared" / "data"]
    for folder in folders:
        if (folder / TEXT).is_file():
            return (folder / TEXT).resolve()
    raise SystemExit(f"{TEXT}: not found; set QKV_DATA to the folder that contains it")


def _train(engine: Engine, workload: dict[str, Any], payload: dict[str, Any], *, threads: int) -> dict[str, Any]:
    with EngineProcess(engine.command, threads=threads) as process:
        described = process.send_request("describe", workload=workload, options=engine.options)
        timing = process.send_request("time", **payload)
        return {**described, **timing, **process.send_request("check")}


def _row(name: str, trained: dict[str, Any]) -> list[str]:
    return [
        name,
        f"{trained['output'][0]:.4f}",
        f"{trained['cpu']:.0f}",
        f"{trained['wall']:.0f}",
        f"{trained['steps']:,}",
        f"{trained['parameters']:,}",
    ]
