"""Engines beside each other: outputs compared, then timed in turn, the best of each kept."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engine import Engine, EngineError, MissingEngineError, Running

Say = Callable[[str], None]
CEILINGS = Engine(name="ceilings", module="benchmarks.engines.ceilings")
"""What the machine can do at most, timed beside the engines."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the user asks of any benchmark."""

    peers: Path | None
    """A folder of clones."""
    repeats: int
    threads: int | None
    """None: what the benchmark itself takes."""
    say: Say
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Best:
    """The least seconds of any repeat; wall and CPU each by itself."""

    wall: float
    cpu: float


@dataclass(kw_only=True)
class Comparison:
    """What came of it: figures of those that ran, reasons for those that did not."""

    best: dict[str, Best] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    ceilings: dict[int, dict[str, float]] = field(default_factory=dict)
    largest_difference: float = 0.0
    """Between the first engine's output and any other's in the same precision."""

    def timed(self, engines: Sequence[Engine]) -> Iterator[tuple[Engine, Best, list[str]]]:
        """Those that ran; last, a peer's time over the best of ours: by the clock, and by CPU time."""
        ours = [self.best[engine.name] for engine in engines if engine.is_ours and engine.name in self.best]
        for engine in engines:
            best = self.best.get(engine.name)
            if best is None:
                continue
            ratios = ["–", "–"]
            if ours and not engine.is_ours:
                wall, cpu = min(own.wall for own in ours), min(own.cpu for own in ours)
                ratios = [f"{best.wall / wall:.2f}", f"{best.cpu / cpu:.2f}"]
            yield engine, best, ratios

    @property
    def absent(self) -> list[str]:
        """Why who is not among them is not."""
        return [
            *(f"Not here: {name}: {reason}." for name, reason in self.missing.items()),
            *(f"Failed: {name}: {reason}." for name, reason in self.failed.items()),
        ]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What every engine is asked."""

    work: Mapping[str, Any]
    check_steps: int
    time_steps: int
    tolerance: float
    threads: int


def compare(engines: Sequence[Engine], plan: Plan, *, ceilings: Engine, repeats: int, say: Say) -> Comparison:
    """The first engine's output is the one that the others must give."""
    found = Comparison()
    with ExitStack() as stack:
        running: dict[str, Running] = {}
        expected: list[float] | None = None
        for engine in engines:
            process = stack.enter_context(Running(engine.command, threads=plan.threads))
            output = _first_answers(engine, process, plan, found)
            if output is None:
                say(f"{engine.name}: {found.missing.get(engine.name) or found.failed[engine.name]}")
                continue
            expected = output if expected is None else expected
            apart = _distance(output, expected)
            allowed = plan.tolerance if engine.tolerance is None else engine.tolerance
            if not apart <= allowed:
                found.failed[engine.name] = f"outputs differ by {apart:.2g}, more than {allowed:.2g}: not timed"
                say(f"{engine.name}: {found.failed[engine.name]}")
                continue
            if engine.tolerance is None:
                found.largest_difference = max(found.largest_difference, apart)
            say(f"{engine.name}: output agrees ({apart:.1e})")
            running[engine.name] = process
        meter = stack.enter_context(Running(ceilings.command, threads=plan.threads))
        _time_in_turn(running, meter, plan, found, repeats=repeats, say=say)
    return found


def _first_answers(engine: Engine, process: Running, plan: Plan, found: Comparison) -> list[float] | None:
    try:
        answer = process.ask("describe", work=plan.work, options=engine.options)
        found.versions |= answer["versions"]
        return process.ask("check", steps=plan.check_steps)["output"]
    except MissingEngineError as missing:
        found.missing[engine.name] = str(missing)
    except EngineError as failed:
        found.failed[engine.name] = str(failed)
    return None


def _distance(output: list[float], expected: list[float]) -> float:
    """Largest difference; infinite where the lengths differ, NaN stays NaN and so agrees with nothing."""
    if len(output) != len(expected):
        return float("inf")
    apart = [abs(a - b) for a, b in zip(output, expected, strict=True)]
    return next((value for value in apart if math.isnan(value)), max(apart))


def _time_in_turn(
    running: dict[str, Running], meter: Running, plan: Plan, found: Comparison, *, repeats: int, say: Say
) -> None:
    for repeat in range(repeats):
        rates = meter.ask("time", threads=sorted({1, plan.threads}))["ceilings"]
        for threads, rate in rates.items():
            known = found.ceilings.setdefault(int(threads), rate)
            found.ceilings[int(threads)] = {what: max(value, known[what]) for what, value in rate.items()}
        for name, process in list(running.items()):
            try:
                seconds = process.ask("time", steps=plan.time_steps)
            except EngineError as failed:
                found.failed[name] = str(failed)
                found.best.pop(name, None)
                del running[name]
                continue
            known = found.best.get(name, Best(wall=float("inf"), cpu=float("inf")))
            found.best[name] = Best(wall=min(known.wall, seconds["wall"]), cpu=min(known.cpu, seconds["cpu"]))
        say(f"round {repeat + 1} of {repeats}: " + ", ".join(f"{n} {b.wall:.3g} s" for n, b in found.best.items()))
