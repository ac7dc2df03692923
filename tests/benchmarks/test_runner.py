"""Engines are timed alternately, the best time counts, and engines that are missing or fail have no times."""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.engine import Engine, EngineError, EngineProcess
from benchmarks.runner import BestTimes, ComparisonPlan, compare

FAKE = str(Path(__file__).parent / "fake_engine.py")
PLAN = ComparisonPlan(workload={}, check_steps=3, time_steps=7, tolerance=1e-4, threads=2)


@dataclass(frozen=True, kw_only=True)
class FakeEngine(Engine):
    argument: str = ""

    @property
    def command(self):
        # The folder of the script comes first on its path, so the root of the repository is added for the packages.
        code = f"import sys, runpy; sys.path.insert(0, '.'); sys.argv = ['fake', {self.argument!r}]; "
        return [sys.executable, "-c", code + f"runpy.run_path({FAKE!r}, run_name='__main__')"]


CEILING_ENGINE = FakeEngine(name="ceilings", module="", argument="ceilings")


@pytest.fixture
def timing_log(tmp_path):
    return tmp_path / "timing_log"


@pytest.fixture
def fake(timing_log):
    def make(name, *, output=1.5, seconds=(5.0, 5.0, 5.0), tolerance=None, **options):
        settings = {"name": name, "output": output, "seconds": seconds, "timing_log": str(timing_log), **options}
        return FakeEngine(name=name, module="", options=settings, tolerance=tolerance)

    return make


def run(*engines, repeats=3):
    messages = []
    return compare(list(engines), PLAN, ceilings=CEILING_ENGINE, repeats=repeats, log=messages.append), messages


def test_engines_are_timed_alternately(fake, timing_log):
    run(fake("a"), fake("b"))
    assert timing_log.read_text().split() == ["a", "b", "a", "b", "a", "b"]


def test_the_best_wall_and_cpu_times_are_taken_separately(fake):
    result, _ = run(fake("a", seconds=[5.0, 3.0, 4.0]))
    assert result.best == {"a": BestTimes(wall=3.0, cpu=1.5)}


def test_a_missing_peer_is_reported_and_the_others_run(fake):
    result, messages = run(fake("a"), fake("b", missing="pip install b"))
    assert result.missing == {"b": "pip install b"}
    assert list(result.best) == ["a"]
    assert "b: pip install b" in messages


def test_an_engine_with_a_different_output_is_not_timed(fake, timing_log):
    result, _ = run(fake("a", output=1.5), fake("b", output=1.5002), fake("c", output=1.50005))
    assert list(result.failed) == ["b"]
    assert "0.0002" in result.failed["b"]
    assert "0.0001" in result.failed["b"]
    assert set(timing_log.read_text().split()) == {"a", "c"}
    assert result.largest_difference == pytest.approx(5e-5)


def test_an_engine_in_lower_precision_has_a_separate_tolerance(fake):
    result, _ = run(fake("a"), fake("b", output=1.51, tolerance=0.02), fake("c", output=1.53, tolerance=0.02))
    assert list(result.best) == ["a", "b"]
    assert "0.02" in result.failed["c"]
    assert result.largest_difference == 0.0


def test_nan_agrees_with_nothing(fake):
    result, _ = run(fake("a"), fake("b", output=float("nan")))
    assert "nan" in result.failed["b"]


def test_a_failing_engine_is_reported_and_the_others_run(fake):
    result, _ = run(fake("a"), fake("b", fails=True))
    assert result.failed == {"b": "ValueError: broken"}
    assert list(result.best) == ["a"]


def test_an_engine_that_exits_while_it_is_timed_has_no_times(fake, timing_log):
    result, _ = run(fake("a"), fake("b", exits_at=2))
    assert list(result.failed) == ["b"]
    assert "3: out of memory" in result.failed["b"]
    assert list(result.best) == ["a"]
    assert timing_log.read_text().split() == ["a", "b", "a", "b", "a"]


def test_ceilings_are_the_best_of_all_rounds_for_one_thread_and_for_the_threads_of_the_workload(fake):
    result, _ = run(fake("a"))
    assert result.ceilings == {1: {"flops": 3e9, "bytes": 2e9}, 2: {"flops": 3e9, "bytes": 2e9}}


def test_versions_of_all_engines_are_recorded(fake):
    result, _ = run(fake("a"), fake("b"))
    assert result.versions == {"a": "1.0", "b": "1.0"}


def test_an_engine_that_cannot_start_is_an_error_with_its_last_line_of_stderr():
    with (
        EngineProcess([sys.executable, "-c", "raise SystemExit('no such engine')"], threads=1) as process,
        pytest.raises(EngineError, match="1: no such engine"),
    ):
        process.send_request("describe")


def test_every_round_is_recorded(fake):
    result, _ = run(fake("a", seconds=[5.0, 3.0, 4.0]))
    assert result.rounds == {"a": [5.0, 3.0, 4.0]}


def test_an_engine_runs_the_code_of_its_checkout(tmp_path):
    code = "import json, os; print(json.dumps([os.getcwd(), os.environ['PYTHONPATH'].split(os.pathsep)[0]]))"
    with EngineProcess([sys.executable, "-c", f"{code}"], threads=1, root=tmp_path) as process:
        assert process.send_request("describe") == [str(tmp_path), str(tmp_path / "src")]
