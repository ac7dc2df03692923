"""Compare engines by checking that their outputs agree, timing them alternately and keeping each engine's best time."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engine import Engine, EngineError, EngineProcess, MissingEngineError

LogFunction = Callable[[str], None]
CEILINGS = Engine(name="ceilings", module="benchmarks.engines.cpu_ceilings")
"""Engine that measures the machine's peak rates in the same run as the other engines."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """The command-line options that all benchmarks share."""

    peers: Path | None
    """Folder that contains clones of the peers' repositories."""
    repeats: int
    threads: int | None
    """Number of threads. If None, the benchmark's default is used."""
    log: LogFunction
    device: str = "cpu"
    baseline: Path | None = None
    """Another checkout of qkv to compare with."""
    only: str = ""
    """Run only the workloads whose description contains this text."""
    out: Path | None = None
    """Folder in which a benchmark may save intermediate results."""
    dtype: str | None = None
    """Precision of inference. If None, the default of the device is used."""
    refit: Path | None = None
    """File with the measurements of an earlier run, from which `cost` computes new predictions."""


@dataclass(frozen=True, kw_only=True)
class BestTimes:
    """The smallest wall-clock and CPU times over all rounds in seconds. The two times may be from different rounds."""

    wall: float
    cpu: float


@dataclass(kw_only=True)
class Comparison:
    """The results of a comparison: the times of the engines that ran and the reasons why other engines did not run."""

    best: dict[str, BestTimes] = field(default_factory=dict)
    rounds: dict[str, list[float]] = field(default_factory=dict)
    """Wall-clock seconds of each round."""
    missing: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    ceilings: dict[int, dict[str, float]] = field(default_factory=dict)
    largest_difference: float = 0.0
    """Largest difference between the output of the first engine and that of any other engine in the same precision."""

    def timed_engines(self, engines: Sequence[Engine]) -> Iterator[tuple[Engine, BestTimes, list[str]]]:
        """Yield each engine that ran, with its times and the speedup of qkv over the engine.

        Speedups are given for wall-clock time and for CPU time.
        """
        ours = [self.best[engine.name] for engine in engines if engine.is_ours and engine.name in self.best]
        for engine in engines:
            best = self.best.get(engine.name)
            if best is None:
                continue
            ratios = ["–", "–"]
            if ours and not engine.is_ours:
                wall, cpu = min(times.wall for times in ours), min(times.cpu for times in ours)
                ratios = [f"{best.wall / wall:.2f}", f"{best.cpu / cpu:.2f}"]
            yield engine, best, ratios

    @property
    def absence_notes(self) -> list[str]:
        """The notes that explain why engines are missing or have failed."""
        return [
            *(f"Not installed: {name}: {reason}." for name, reason in self.missing.items()),
            *(f"Failed: {name}: {reason}." for name, reason in self.failed.items()),
        ]


@dataclass(frozen=True, kw_only=True)
class ComparisonPlan:
    """The workload and settings that are sent to every engine."""

    workload: Mapping[str, Any]
    check_steps: int
    time_steps: int
    """Number of steps per measurement. Engines that decode repeat the measurement instead and return the mean time of
    one decode step."""
    tolerance: float
    threads: int


def compare(
    engines: Sequence[Engine], plan: ComparisonPlan, *, ceilings: Engine, repeats: int, log: LogFunction
) -> Comparison:
    """Check and time the engines. The output of the first engine is the reference for all other engines."""
    result = Comparison()
    with ExitStack() as stack:
        running: dict[str, EngineProcess] = {}
        expected: list[float] | None = None
        for engine in engines:
            process = stack.enter_context(EngineProcess(engine.command, threads=plan.threads, root=engine.root))
            output = _describe_and_check(engine, process, plan, result)
            if output is None:
                log(f"{engine.name}: {result.missing.get(engine.name) or result.failed[engine.name]}")
                continue
            expected = output if expected is None else expected
            difference = _distance(output, expected)
            allowed = plan.tolerance if engine.tolerance is None else engine.tolerance
            if not difference <= allowed:
                result.failed[engine.name] = (
                    f"not timed: outputs differ from the reference by {difference:.2g}, expected at most {allowed:.2g}"
                )
                log(f"{engine.name}: {result.failed[engine.name]}")
                continue
            if engine.tolerance is None:
                result.largest_difference = max(result.largest_difference, difference)
            log(f"{engine.name}: output agrees ({difference:.1e})")
            running[engine.name] = process
        ceiling_process = stack.enter_context(EngineProcess(ceilings.command, threads=plan.threads))
        _time_alternately(running, ceiling_process, plan, result, repeats=repeats, log=log)
    return result


def _describe_and_check(
    engine: Engine, process: EngineProcess, plan: ComparisonPlan, result: Comparison
) -> list[float] | None:
    """Return the output of an engine, or record why the engine is missing or failed and return None."""
    try:
        response = process.send_request("describe", workload=plan.workload, options=engine.options)
        result.versions |= response["versions"]
        return process.send_request("check", steps=plan.check_steps)["output"]
    except MissingEngineError as missing:
        result.missing[engine.name] = str(missing)
    except EngineError as failed:
        result.failed[engine.name] = str(failed)
    return None


def _distance(output: list[float], expected: list[float]) -> float:
    """Return the largest difference between two outputs.

    The difference is infinite if the lengths differ, and NaN if any value is NaN.
    """
    if len(output) != len(expected):
        return float("inf")
    difference = [abs(a - b) for a, b in zip(output, expected, strict=True)]
    return next((value for value in difference if math.isnan(value)), max(difference))


def _time_alternately(
    running: dict[str, EngineProcess],
    ceiling_process: EngineProcess,
    plan: ComparisonPlan,
    result: Comparison,
    *,
    repeats: int,
    log: LogFunction,
) -> None:
    """Time all engines in turn, round by round, so that a period of high load affects all engines."""
    for repeat in range(repeats):
        rates = ceiling_process.send_request("time", threads=sorted({1, plan.threads}))["ceilings"]
        for threads, rate in rates.items():
            previous = result.ceilings.setdefault(int(threads), rate)
            result.ceilings[int(threads)] = {
                quantity: max(value, previous[quantity]) for quantity, value in rate.items()
            }
        for name, process in list(running.items()):
            try:
                seconds = process.send_request("time", steps=plan.time_steps)
            except EngineError as failed:
                result.failed[name] = str(failed)
                result.best.pop(name, None)
                del running[name]
                continue
            result.rounds.setdefault(name, []).append(seconds["wall"])
            previous = result.best.get(name, BestTimes(wall=float("inf"), cpu=float("inf")))
            result.best[name] = BestTimes(
                wall=min(previous.wall, seconds["wall"]), cpu=min(previous.cpu, seconds["cpu"])
            )
        log(f"round {repeat + 1} of {repeats}: " + ", ".join(f"{n} {b.wall:.3g} s" for n, b in result.best.items()))
