"""Planted bugs turn tests red: a few here, all of them in the long run; and each still fits the source."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.bugs import BUGS

ROOT = Path(__file__).parents[1]


def plant(*words):
    return subprocess.run(
        [sys.executable, ROOT / "tests" / "planted_bugs.py", *words], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_still_fits_the_source_and_names_tests_that_are_there(bug):
    for file, old, new in bug.edits:
        assert (ROOT / "src" / "qkv" / file).read_text(encoding="utf-8").count(old) == 1, (file, old)
        assert new != old
    for test in bug.tests:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), test


def test_no_two_bugs_share_a_name():
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 12


def test_two_planted_bugs_are_caught():
    run = plant("cached position offset", "K and V")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 of 2 planted bugs caught" in run.stdout


def test_an_unknown_bug_is_refused():
    run = plant("no such bug")
    assert run.returncode == 2
    assert "no bug is named no such bug; known: causal mask off by one," in run.stdout


@pytest.mark.long
def test_every_planted_bug_is_caught():
    run = plant()
    assert run.returncode == 0, run.stdout + run.stderr
