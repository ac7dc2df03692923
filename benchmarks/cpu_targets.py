"""Compare qkv with every speed target on a CPU in one run, and create a table and a plot."""

import io
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks import beam, decode, machine, training_speed
from benchmarks.engine import ROOT, Engine
from benchmarks.engines.beam_workload import Workload as BeamWork
from benchmarks.engines.decode_workload import Workload as DecodeWork
from benchmarks.engines.encode_workload import Workload as EncodeWork
from benchmarks.engines.next_token_workload import Workload as TrainWork
from benchmarks.results import Report
from benchmarks.runner import CEILINGS, BenchmarkOptions, BestTimes, Comparison, ComparisonPlan, compare

HF, LLAMA, NANOGPT = decode.TRANSFORMERS.name, decode.LLAMA_CPP.name, "nanoGPT, fused AdamW"
PLOT_NAME = "speed-cpu.png"
CHUNK = 256
MAX_BAR_WIDTH = 3.0
"""Length of the longest bar in the plot, as a multiple of the target. Longer bars are truncated."""
HELP = "import sys; sys.argv = ['qkv', '--help']; from qkv.cli import main; main()"
ENCODERS = [
    Engine(name="qkv", module="benchmarks.engines.encode_qkv", is_ours=True),
    Engine(name="Hugging Face", module="benchmarks.engines.encode_transformers"),
    Engine(name="ONNX Runtime", module="benchmarks.engines.encode_onnxruntime"),
]


@dataclass(frozen=True, kw_only=True)
class SpeedTarget:
    """A target for the speed of the fastest engine in `ours` relative to the fastest engine in `peers`."""

    row: str
    peers: tuple[str, ...]
    min_ratio: float
    ours: tuple[str, ...] = ("qkv",)
    n_bytes: float = 0.0
    """Number of bytes that the timed work must read at least once."""
    n_flops: float = 0.0
    """FLOPs of the timed work. With `n_bytes` and the machine's peak rates, they give a lower bound on the time."""


@dataclass(frozen=True, kw_only=True)
class ComparisonGroup:
    """A group of engines that are compared on the same workload, with their speed targets."""

    description: str
    engines: Sequence[Engine]
    plan: ComparisonPlan
    targets: Sequence[SpeedTarget]
    repeats: int


@dataclass(frozen=True, kw_only=True)
class TargetResult:
    """A measured speed ratio and its target. Larger ratios are better."""

    row: str
    description: str
    peer: str
    cells: Sequence[str]
    ratio: float
    min_ratio: float


def cpu(options: BenchmarkOptions) -> Report:
    load, threads = machine.load_average(), options.threads or machine.available_cores()
    started, results, notes, versions = time.perf_counter(), list[TargetResult](), list[str](), dict[str, str]()
    for group in [
        *_decoding_groups(threads),
        _translation_group(options, threads),
        *_training_groups(options, threads),
        *_encoding_groups(threads),
    ]:
        options.log(f"{group.description}, after {time.perf_counter() - started:.0f} s")
        repeats = max(1, round(group.repeats * options.repeats / 3))
        comparison = compare(group.engines, group.plan, ceilings=CEILINGS, repeats=repeats, log=options.log)
        results += [
            line for target in group.targets if (line := _compare_to_target(target, group, comparison)) is not None
        ]
        notes += [f"{group.description}: {note}" for note in comparison.absence_notes]
        versions |= comparison.versions
        ceilings = comparison.ceilings.get(threads, {})
        notes.append(
            f'Peak rates during "{group.description}": {ceilings["flops"] / 1e9:.0f} GFLOP/s, '
            f"{ceilings['bytes'] / 1e9:.1f} GB/s."
        )
    results += [_measure_memory(), *_measure_startup()]
    n_reached = sum(result.ratio >= result.min_ratio for result in results)
    return Report(
        name="cpu",
        description=(
            f"All speed targets on a CPU with {threads} thread{'s' * (threads > 1)}. The benchmark took "
            f"{(time.perf_counter() - started) / 60:.0f} minutes."
        ),
        columns=[
            "row",
            "workload",
            "peer",
            "qkv ms",
            "peer ms",
            "speedup",
            "speedup (CPU time)",
            "target",
            "result",
            "of peak",
        ],
        rows=[[result.row, result.description, result.peer, *result.cells] for result in results],
        notes=[
            f"{n_reached} of {len(results)} targets are reached.",
            f"![Ratios](../docs/pictures/{PLOT_NAME})",
            *notes,
        ],
        versions=versions,
        load=load,
        plots={PLOT_NAME: _plot_results(results)},
    )


def _decoding_groups(threads: int) -> list[ComparisonGroup]:
    int8, peers = decode.INT8_ENGINES[0].name, (HF, "CTranslate2", LLAMA)
    int8_peers = (HF, *(f"{name}, int8" for name in peers[1:]))
    min_ratios = {1: ((1.9, 0.95, 1.1), (4.0, 2.3, 0.8)), 16: ((1.7, 0.95, 1.6), (4.0, 2.0, 2.3))}
    groups = []
    for batch, rows in ((1, ("C1", "C2")), (16, ("C3", "C4"))):
        workload = DecodeWork(**decode.GPT2, batch=batch, threads=threads)
        flops, n = 2.0 * workload.n_weights * batch, float(workload.n_weights)
        targets = [
            SpeedTarget(row=rows[0], peers=(peer,), min_ratio=min_ratio, n_bytes=4 * n, n_flops=flops)
            for peer, min_ratio in zip(peers, min_ratios[batch][0], strict=True)
        ]
        targets += [
            SpeedTarget(row=rows[1], ours=(int8,), peers=(peer,), min_ratio=min_ratio, n_bytes=n)
            for peer, min_ratio in zip(int8_peers, min_ratios[batch][1], strict=True)
        ]
        description, engines = f"decode 124M, {batch} text(s)", [*decode.FLOAT32_ENGINES, *decode.INT8_ENGINES]
        groups.append(
            ComparisonGroup(
                description=description,
                engines=engines,
                plan=_plan(workload, 0.0),
                targets=targets,
                repeats=5 if batch == 1 else 3,
            )
        )
    workload = DecodeWork(**decode.SMALL, batch=1, threads=threads)
    small = SpeedTarget(row="C5", peers=(HF,), min_ratio=5.0, n_bytes=4.0 * workload.n_weights)
    description = "decode 12 layers of width 64"
    engines = [decode.OURS, decode.TRANSFORMERS]
    return [
        *groups,
        ComparisonGroup(
            description=description, engines=engines, plan=_plan(workload, 0.0), targets=[small], repeats=7
        ),
    ]


def _translation_group(options: BenchmarkOptions, threads: int) -> ComparisonGroup:
    ct2 = Engine(name="CTranslate2", module="benchmarks.engines.beam_ctranslate2")
    min_ratios = {HF: 2.0, "JoeyNMT": 5.0, ct2.name: 0.45}
    return ComparisonGroup(
        description="translate, beam 5, 64 tokens",
        engines=[*beam.engines(options), ct2],
        plan=_plan(BeamWork(**beam.SHAPE, batch=1, threads=threads), 0.0),
        targets=[SpeedTarget(row="C6", peers=(peer,), min_ratio=min_ratio) for peer, min_ratio in min_ratios.items()],
        repeats=5,
    )


def _training_groups(options: BenchmarkOptions, threads: int) -> list[ComparisonGroup]:
    """Build the groups for training GPT-2 124M and a small model.

    The 124M model runs without compilation because three more engines would not fit into 16 GB. Compilation gains 3 %
    (see `train-124m`).
    """
    engines_by_name = {engine.name: engine for engine in training_speed.engines(options.peers)}
    large, small = (TrainWork(**shape, threads=threads) for shape in (training_speed.GPT2, training_speed.SMALL))
    flops = [float(workload.flops_per_token * workload.batch * workload.length) for workload in (large, small)]
    compiled = ("qkv", "qkv, compiled"), (NANOGPT, "nanoGPT, fused, compiled")
    return [
        ComparisonGroup(
            description="train 124M, 2 × 128",
            engines=[engines_by_name[name] for name in ("qkv", NANOGPT, "Hugging Face")],
            plan=_plan(large, 1e-4),
            targets=[
                SpeedTarget(row="T1", peers=(p,), min_ratio=1.1, n_flops=flops[0]) for p in (NANOGPT, "Hugging Face")
            ],
            repeats=5,
        ),
        ComparisonGroup(
            description="train nanoGPT's small model",
            engines=[engines_by_name[name] for names in compiled for name in names],
            plan=replace(_plan(small, 1e-4), time_steps=20),
            targets=[SpeedTarget(row="T2", ours=compiled[0], peers=compiled[1], min_ratio=1.2, n_flops=20 * flops[1])],
            repeats=5,
        ),
    ]


def _encoding_groups(threads: int) -> list[ComparisonGroup]:
    sizes = {
        "encode, 16 texts of 64": ((16, 64, 64, 16, 4), (1.05, 0.95), "E1"),
        "encode, 1 text of 32": ((1, 32, 32, 1, 40), (1.4,), "E1"),
        "encode, 64 texts of 1 to 96": ((64, 1, 96, 32, 1), (1.5,), "E2"),
    }
    names = ("n_texts", "shortest", "longest", "batch", "n_calls")
    groups = []
    for description, (size, min_ratios, row) in sizes.items():
        workload = EncodeWork(**dict(zip(names, size, strict=True)), threads=threads)
        n = sum(map(len, workload.texts())) * workload.n_calls
        flops = 2.0 * 12 * workload.n_layers * workload.d_model**2 * n
        chosen = ENCODERS[: 1 + len(min_ratios)]
        peers = zip(chosen[1:], min_ratios, strict=True)
        targets = [
            SpeedTarget(row=row, peers=(peer.name,), min_ratio=min_ratio, n_flops=flops) for peer, min_ratio in peers
        ]
        title = description if workload.fill == 1 else f"{description} (fill {workload.fill:.0%})"
        groups.append(
            ComparisonGroup(description=title, engines=chosen, plan=_plan(workload, 1e-4), targets=targets, repeats=5)
        )
    return groups


def _plan(workload: Any, tolerance: float) -> ComparisonPlan:  # noqa: ANN401 - any workload of the engines
    return ComparisonPlan(
        workload=asdict(workload), check_steps=1, time_steps=1, tolerance=tolerance, threads=workload.threads
    )


def _compare_to_target(target: SpeedTarget, group: ComparisonGroup, comparison: Comparison) -> TargetResult | None:
    """Compare the measured times with a target and return the result, or None if an engine is missing."""
    ours, theirs = (
        _fastest([comparison.best[name] for name in side if name in comparison.best])
        for side in (target.ours, target.peers)
    )
    if ours is None or theirs is None:
        return None
    ratio, by_cpu = theirs.wall / ours.wall, theirs.cpu / ours.cpu
    rates = comparison.ceilings[group.plan.threads]
    min_seconds = max(target.n_bytes / rates["bytes"], target.n_flops / rates["flops"])
    milliseconds = [f"{1000 * times.wall:.4g}" for times in (ours, theirs)]
    fraction = f"{min_seconds / ours.wall:.0%}" if min_seconds else "–"
    cells = [
        *milliseconds,
        f"{ratio:.2f}",
        f"{by_cpu:.2f}",
        f"{target.min_ratio:g}",
        _target_cell(ratio, target.min_ratio),
        fraction,
    ]
    return TargetResult(
        row=target.row,
        description=group.description,
        peer=target.peers[0],
        cells=cells,
        ratio=ratio,
        min_ratio=target.min_ratio,
    )


def _fastest(times: Sequence[BestTimes]) -> BestTimes | None:
    return BestTimes(wall=min(best.wall for best in times), cpu=min(best.cpu for best in times)) if times else None


def _target_cell(ratio: float, min_ratio: float) -> str:
    return "reached" if ratio >= min_ratio else "**missed**"


def _measure_memory() -> TargetResult:
    unchunked, chunked = (
        float(_run("-m", "benchmarks.engines.peak_memory", str(chunk)).split()[0]) for chunk in (0, CHUNK)
    )
    description, min_ratio = f"MiB added by a step, V = 50k, loss in chunks of {CHUNK}", 1 / 0.6
    cells = [f"{chunked:.0f} MiB", f"{unchunked:.0f} MiB", f"{unchunked / chunked:.2f}", "–", f"{min_ratio:.2f}"]
    cells += [_target_cell(unchunked / chunked, min_ratio), "–"]
    return TargetResult(
        row="T3",
        description=description,
        peer="unchunked loss",
        cells=cells,
        ratio=unchunked / chunked,
        min_ratio=min_ratio,
    )


def _measure_startup() -> list[TargetResult]:
    limit, results = 0.35, []
    for description, code in (("import qkv", "import qkv"), ("qkv --help", HELP)):
        seconds = []
        for _ in range(7):
            before = time.perf_counter()
            _run("-c", code)
            seconds.append(time.perf_counter() - before)
        ratio = limit / min(seconds)
        cells = [
            f"{1000 * min(seconds):.0f}",
            f"{1000 * limit:.0f}",
            f"{ratio:.2f}",
            "–",
            "1",
            _target_cell(ratio, 1.0),
            "–",
        ]
        results.append(
            TargetResult(row="S1", description=description, peer="limit", cells=cells, ratio=ratio, min_ratio=1.0)
        )
    return results


def _run(*arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _plot_results(results: Sequence[TargetResult]) -> bytes:
    """Plot each speed ratio relative to its target and return a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.36 * len(results) + 1.2), layout="constrained")
    axes = figure.subplots()
    indices, fractions = range(len(results)), [result.ratio / result.min_ratio for result in results]
    axes.barh(indices, fractions, color=["tab:green" if fraction >= 1 else "tab:orange" for fraction in fractions])
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(
        indices, [f"{result.row}  {result.description}, vs. {result.peer}" for result in results], fontsize=8
    )
    for index, result in zip(indices, results, strict=True):
        text, position = f" {result.ratio:.2f} of {result.min_ratio:.3g}", (min(fractions[index], MAX_BAR_WIDTH), index)
        axes.annotate(text, position, va="center", fontsize=8, bbox={"color": "white", "pad": 0.5})
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * min(max(fractions), MAX_BAR_WIDTH))
    axes.set_xlabel("speedup over the peer, relative to the target")
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()
