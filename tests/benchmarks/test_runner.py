"""Engines side by side: in turn, the best counts, and one that is missing, wrong or dead has no figure."""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.engine import Engine, EngineError, Running
from benchmarks.runner import Best, Plan, compare

FAKE = str(Path(__file__).parent / "fake_engine.py")
PLAN = Plan(work={}, check_steps=3, time_steps=7, tolerance=1e-4, threads=2)


@dataclass(frozen=True, kw_only=True)
class FakeEngine(Engine):
    argument: str = ""

    @property
    def command(self):
        # The script's own folder comes first on its path; the packages are found from the repository's root.
        code = f"import sys, runpy; sys.path.insert(0, '.'); sys.argv = ['fake', {self.argument!r}]; "
        return [sys.executable, "-c", code + f"runpy.run_path({FAKE!r}, run_name='__main__')"]


METER = FakeEngine(name="ceilings", module="", argument="meter")


@pytest.fixture
def diary(tmp_path):
    return tmp_path / "diary"


@pytest.fixture
def fake(diary):
    def make(name, *, output=1.5, seconds=(5.0, 5.0, 5.0), tolerance=None, **options):
        given = {"name": name, "output": output, "seconds": seconds, "diary": str(diary), **options}
        return FakeEngine(name=name, module="", options=given, tolerance=tolerance)

    return make


def run(*engines, repeats=3):
    said = []
    return compare(list(engines), PLAN, ceilings=METER, repeats=repeats, say=said.append), said


def test_engines_take_turns(fake, diary):
    run(fake("a"), fake("b"))
    assert diary.read_text().split() == ["a", "b", "a", "b", "a", "b"]


def test_the_best_repeat_counts_for_wall_and_cpu_time_each(fake):
    found, _ = run(fake("a", seconds=[5.0, 3.0, 4.0]))
    assert found.best == {"a": Best(wall=3.0, cpu=1.5)}


def test_a_missing_peer_is_named_with_its_reason_and_the_others_run(fake):
    found, said = run(fake("a"), fake("b", missing="pip install b"))
    assert found.missing == {"b": "pip install b"}
    assert list(found.best) == ["a"]
    assert "b: pip install b" in said


def test_an_engine_with_another_output_is_not_timed(fake, diary):
    found, _ = run(fake("a", output=1.5), fake("b", output=1.5002), fake("c", output=1.50005))
    assert found.failed == {"b": "outputs differ by 0.0002, more than 0.0001: not timed"}
    assert set(diary.read_text().split()) == {"a", "c"}
    assert found.largest_difference == pytest.approx(5e-5)


def test_an_engine_of_lower_precision_has_its_own_tolerance(fake):
    found, _ = run(fake("a"), fake("b", output=1.51, tolerance=0.02), fake("c", output=1.53, tolerance=0.02))
    assert list(found.best) == ["a", "b"]
    assert "more than 0.02" in found.failed["c"]
    assert found.largest_difference == 0.0


def test_not_a_number_agrees_with_nothing(fake):
    found, _ = run(fake("a"), fake("b", output=float("nan")))
    assert "nan" in found.failed["b"]


def test_an_engine_that_breaks_says_why_and_the_others_run(fake):
    found, _ = run(fake("a"), fake("b", fails=True))
    assert found.failed == {"b": "ValueError: it broke"}
    assert list(found.best) == ["a"]


def test_an_engine_that_dies_while_timed_leaves_no_figure(fake, diary):
    found, _ = run(fake("a"), fake("b", dies_at=2))
    assert found.failed == {"b": "ended with status 3: out of memory"}
    assert list(found.best) == ["a"]
    assert diary.read_text().split() == ["a", "b", "a", "b", "a"]


def test_ceilings_are_the_best_of_all_rounds_for_one_thread_and_the_works_own(fake):
    found, _ = run(fake("a"))
    assert found.ceilings == {1: {"flops": 3e9, "bytes": 2e9}, 2: {"flops": 3e9, "bytes": 2e9}}


def test_versions_of_all_engines_are_kept(fake):
    found, _ = run(fake("a"), fake("b"))
    assert found.versions == {"a": "1.0", "b": "1.0"}


def test_a_command_that_cannot_start_an_engine_is_an_error_with_its_last_words():
    with (
        Running([sys.executable, "-c", "raise SystemExit('no such engine')"], threads=1) as process,
        pytest.raises(EngineError, match="ended with status 1: no such engine"),
    ):
        process.ask("describe")
