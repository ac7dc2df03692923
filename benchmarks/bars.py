"""Every bar of speed on a CPU in one run: ours, each peer, the ratio, what was to be reached, a plot of all."""

import io
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks import beam, decode, machine, training_speed
from benchmarks.engine import ROOT, Engine
from benchmarks.engines.beam_work import Work as BeamWork
from benchmarks.engines.decode_work import Work as DecodeWork
from benchmarks.engines.encode_work import Work as EncodeWork
from benchmarks.engines.next_token_work import Work as TrainWork
from benchmarks.results import Report
from benchmarks.runner import CEILINGS, Asked, Best, Comparison, Plan, compare

HF, LLAMA, NANOGPT = decode.TRANSFORMERS.name, decode.LLAMA_CPP.name, "nanoGPT, fused AdamW"
PICTURE = "speed-cpu.png"
CHUNK = 256
WIDEST = 3.0
"""Times its bar: a longer one is cut off in the plot, or it would leave no room for the others."""
HELP = "import sys; sys.argv = ['qkv', '--help']; from qkv.cli import main; main()"
ENCODERS = [
    Engine(name="qkv", module="benchmarks.engines.encode_qkv", is_ours=True),
    Engine(name="Hugging Face", module="benchmarks.engines.encode_transformers"),
    Engine(name="ONNX Runtime", module="benchmarks.engines.encode_onnxruntime"),
]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """`reach`: how many times as fast as the best of `peers` the best of `ours` is to be."""

    row: str
    peers: tuple[str, ...]
    reach: float
    ours: tuple[str, ...] = ("qkv",)
    n_bytes: float = 0.0
    """Read at least once in what is timed, and"""
    n_flops: float = 0.0
    """computed: whichever takes longer at the machine's rates is the least time there is."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Engines that are compared in one go."""

    what: str
    engines: Sequence[Engine]
    plan: Plan
    bars: Sequence[Bar]
    repeats: int


@dataclass(frozen=True, kw_only=True)
class Line:
    """One ratio beside its bar; both are the larger the better."""

    row: str
    what: str
    peer: str
    cells: Sequence[str]
    ratio: float
    reach: float


def cpu(asked: Asked) -> Report:
    load, threads = machine.others_load(), asked.threads or machine.n_cores()
    started, lines, notes, versions = time.perf_counter(), list[Line](), list[str](), dict[str, str]()
    for group in [*_decoding(threads), _translating(asked, threads), *_training(asked, threads), *_encoding(threads)]:
        asked.say(f"— {group.what}, after {time.perf_counter() - started:.0f} s")
        repeats = max(1, round(group.repeats * asked.repeats / 3))
        found = compare(group.engines, group.plan, ceilings=CEILINGS, repeats=repeats, say=asked.say)
        lines += [line for bar in group.bars if (line := _line(bar, group, found)) is not None]
        notes += [f"{group.what}: {note}" for note in found.absent]
        versions |= found.versions
        ceilings = found.ceilings.get(threads, {})
        notes += [f"Ceiling, {group.what}: {ceilings['flops'] / 1e9:.0f} GFLOP/s, {ceilings['bytes'] / 1e9:.1f} GB/s."]
    lines += [_memory(), *_starting()]
    n_reached = sum(line.ratio >= line.reach for line in lines)
    return Report(
        name="cpu",
        what=f"All bars of speed on a CPU, {threads} thread(s), in {(time.perf_counter() - started) / 60:.0f} minutes.",
        columns=["row", "work", "peer", "ours ms", "its ms", "ours ÷ it", "by CPU time", "reach", "", "of the ceiling"],
        rows=[[line.row, line.what, line.peer, *line.cells] for line in lines],
        notes=[f"{n_reached} of {len(lines)} bars are reached.", f"![Ratios](../docs/pictures/{PICTURE})", *notes],
        versions=versions,
        load=load,
        pictures={PICTURE: _picture(lines)},
    )


def _decoding(threads: int) -> list[Group]:
    int8, peers = decode.IN_INT8[0].name, (HF, "CTranslate2", LLAMA)
    int8_peers = (HF, *(f"{name}, int8" for name in peers[1:]))
    reaches = {1: ((1.9, 0.95, 1.1), (4.0, 2.3, 0.8)), 16: ((1.7, 0.95, 1.6), (4.0, 2.0, 2.3))}
    groups = []
    for batch, rows in ((1, ("C1", "C2")), (16, ("C3", "C4"))):
        work = DecodeWork(**decode.GPT2, batch=batch, threads=threads)
        flops, n = 2.0 * work.n_weights * batch, float(work.n_weights)
        bars = [
            Bar(row=rows[0], peers=(peer,), reach=reach, n_bytes=4 * n, n_flops=flops)
            for peer, reach in zip(peers, reaches[batch][0], strict=True)
        ]
        bars += [
            Bar(row=rows[1], ours=(int8,), peers=(peer,), reach=reach, n_bytes=n)
            for peer, reach in zip(int8_peers, reaches[batch][1], strict=True)
        ]
        what, engines = f"decode 124M, {batch} text(s)", [*decode.IN_FLOAT32, *decode.IN_INT8]
        groups.append(
            Group(what=what, engines=engines, plan=_plan(work, 0.0), bars=bars, repeats=5 if batch == 1 else 3)
        )
    work = DecodeWork(**decode.SMALL, batch=1, threads=threads)
    small = Bar(row="C5", peers=(HF,), reach=5.0, n_bytes=4.0 * work.n_weights)
    what = "decode 12 layers of width 64"
    engines = [decode.OURS, decode.TRANSFORMERS]
    return [*groups, Group(what=what, engines=engines, plan=_plan(work, 0.0), bars=[small], repeats=7)]


def _translating(asked: Asked, threads: int) -> Group:
    ct2 = Engine(name="CTranslate2", module="benchmarks.engines.beam_ctranslate2")
    reaches = {HF: 2.0, "JoeyNMT": 5.0, ct2.name: 0.45}
    return Group(
        what="translate, beam 5, 64 tokens",
        engines=[*beam.engines(asked), ct2],
        plan=_plan(BeamWork(**beam.SHAPE, batch=1, threads=threads), 0.0),
        bars=[Bar(row="C6", peers=(peer,), reach=reach) for peer, reach in reaches.items()],
        repeats=5,
    )


def _training(asked: Asked, threads: int) -> list[Group]:
    """124M without compiling: three engines more would not fit in 16 GB, and gain 3 % (`train-124m` has them)."""
    known = {engine.name: engine for engine in training_speed.engines(asked.peers)}
    large, small = (TrainWork(**shape, threads=threads) for shape in (training_speed.GPT2, training_speed.SMALL))
    flops = [float(work.flops_a_token * work.batch * work.length) for work in (large, small)]
    compiled = ("qkv", "qkv, compiled"), (NANOGPT, "nanoGPT, fused, compiled")
    return [
        Group(
            what="train 124M, 2 × 128",
            engines=[known[name] for name in ("qkv", NANOGPT, "Hugging Face")],
            plan=_plan(large, 1e-4),
            bars=[Bar(row="T1", peers=(p,), reach=1.1, n_flops=flops[0]) for p in (NANOGPT, "Hugging Face")],
            repeats=5,
        ),
        Group(
            what="train nanoGPT's small model",
            engines=[known[name] for names in compiled for name in names],
            plan=replace(_plan(small, 1e-4), time_steps=20),
            bars=[Bar(row="T2", ours=compiled[0], peers=compiled[1], reach=1.2, n_flops=20 * flops[1])],
            repeats=5,
        ),
    ]


def _encoding(threads: int) -> list[Group]:
    sizes = {
        "encode, 16 texts of 64": ((16, 64, 64, 16, 4), (1.05, 0.95), "E1"),
        "encode, 1 text of 32": ((1, 32, 32, 1, 40), (1.4,), "E1"),
        "encode, 64 texts of 1 to 96": ((64, 1, 96, 32, 1), (1.5,), "E2"),
    }
    names = ("n_texts", "shortest", "longest", "batch", "n_calls")
    groups = []
    for what, (size, reaches, row) in sizes.items():
        work = EncodeWork(**dict(zip(names, size, strict=True)), threads=threads)
        n = sum(map(len, work.texts())) * work.n_calls
        flops = 2.0 * 12 * work.n_layers * work.d_model**2 * n
        chosen = ENCODERS[: 1 + len(reaches)]
        peers = zip(chosen[1:], reaches, strict=True)
        bars = [Bar(row=row, peers=(peer.name,), reach=reach, n_flops=flops) for peer, reach in peers]
        said = what if work.fill == 1 else f"{what} (fill {work.fill:.0%})"
        groups.append(Group(what=said, engines=chosen, plan=_plan(work, 1e-4), bars=bars, repeats=5))
    return groups


def _plan(work: Any, tolerance: float) -> Plan:  # noqa: ANN401 - any of the engines' works
    return Plan(work=asdict(work), check_steps=1, time_steps=1, tolerance=tolerance, threads=work.threads)


def _line(bar: Bar, group: Group, found: Comparison) -> Line | None:
    """None where one side is not here."""
    ours, theirs = (_best([found.best[one] for one in side if one in found.best]) for side in (bar.ours, bar.peers))
    if ours is None or theirs is None:
        return None
    ratio, by_cpu = theirs.wall / ours.wall, theirs.cpu / ours.cpu
    rates = found.ceilings[group.plan.threads]
    least = max(bar.n_bytes / rates["bytes"], bar.n_flops / rates["flops"])
    times = [f"{1000 * one.wall:.4g}" for one in (ours, theirs)]
    share = f"{least / ours.wall:.0%}" if least else "–"
    cells = [*times, f"{ratio:.2f}", f"{by_cpu:.2f}", f"{bar.reach:g}", _mark(ratio, bar.reach), share]
    return Line(row=bar.row, what=group.what, peer=bar.peers[0], cells=cells, ratio=ratio, reach=bar.reach)


def _best(times: Sequence[Best]) -> Best | None:
    return Best(wall=min(one.wall for one in times), cpu=min(one.cpu for one in times)) if times else None


def _mark(ratio: float, reach: float) -> str:
    return "reached" if ratio >= reach else "**missed**"


def _memory() -> Line:
    plain, chunked = (
        float(_run("-m", "benchmarks.engines.peak_memory", str(chunk)).split()[0]) for chunk in (0, CHUNK)
    )
    what, reach = f"MiB that a step adds, V = 50k, loss in chunks of {CHUNK}", 1 / 0.6
    cells = [f"{chunked:.0f} MiB", f"{plain:.0f} MiB", f"{plain / chunked:.2f}", "–", f"{reach:.2f}"]
    cells += [_mark(plain / chunked, reach), "–"]
    return Line(row="T3", what=what, peer="the plain loss", cells=cells, ratio=plain / chunked, reach=reach)


def _starting() -> list[Line]:
    limit, lines = 0.35, []
    for what, code in (("import qkv", "import qkv"), ("qkv --help", HELP)):
        seconds = []
        for _ in range(7):
            before = time.perf_counter()
            _run("-c", code)
            seconds.append(time.perf_counter() - before)
        ratio = limit / min(seconds)
        cells = [f"{1000 * min(seconds):.0f}", f"{1000 * limit:.0f}", f"{ratio:.2f}", "–", "1", _mark(ratio, 1.0), "–"]
        lines.append(Line(row="S1", what=what, peer="the limit", cells=cells, ratio=ratio, reach=1.0))
    return lines


def _run(*arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _picture(lines: Sequence[Line]) -> bytes:
    """How far each ratio is beyond its bar, which is 1."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.36 * len(lines) + 1.2), layout="constrained")
    axes = figure.subplots()
    places, shares = range(len(lines)), [line.ratio / line.reach for line in lines]
    axes.barh(places, shares, color=["tab:green" if share >= 1 else "tab:orange" for share in shares])
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(places, [f"{line.row}  {line.what}, beside {line.peer}" for line in lines], fontsize=8)
    for place, line in zip(places, lines, strict=True):
        text, beside = f" {line.ratio:.2f} of {line.reach:.3g}", (min(shares[place], WIDEST), place)
        axes.annotate(text, beside, va="center", fontsize=8, bbox={"color": "white", "pad": 0.5})
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * min(max(shares), WIDEST))
    axes.set_xlabel("ours ÷ the peer, as a share of what was to be reached")
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()
