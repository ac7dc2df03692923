"""Planted bugs make their tests fail."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planted_bugs.bugs import BUGS
from tests.planted_bugs.patching import replace_everywhere, restoring
from tests.planted_bugs.plugin import BROKEN

ROOT = Path(__file__).parents[2]


def run_with_bug(name: str) -> subprocess.CompletedProcess[str]:
    """Run the test of a planted bug without run-time type checks, which could catch the bug instead of the test."""
    options = ["-o", "addopts=--import-mode=importlib", "-q", "-x", "--tb=short", "--no-header"]
    options += ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "tests.planted_bugs.plugin", f"--planted-bug={name}"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.long
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_makes_its_test_fail(name):
    result = run_with_bug(name)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout + result.stderr


def test_every_planted_bug_can_be_installed_and_names_a_test():
    for name, install in BUGS.items():
        with restoring():
            test = install()
        source = Path(inspect.getfile(inspect.unwrap(test)))
        assert source.is_relative_to(ROOT / "tests"), name
        assert test.__name__.startswith("test_"), name


def test_the_run_of_one_planted_bug_fails():
    result = run_with_bug("learning_rate_is_one_step_ahead")
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout + result.stderr
    assert "1 failed" in result.stdout


def test_the_run_of_a_bug_that_changes_nothing_passes():
    result = run_with_bug("no_bug")
    assert result.returncode == pytest.ExitCode.OK, result.stdout + result.stderr
    assert "passed" in result.stdout


def test_a_bug_that_raises_is_reported_as_broken():
    result = run_with_bug("bug_that_raises")
    assert result.returncode == BROKEN, result.stdout + result.stderr
    assert "ZeroDivisionError" in result.stdout + result.stderr


def test_a_function_that_no_module_refers_to_cannot_be_replaced():
    with pytest.raises(LookupError, match="lambda"):
        replace_everywhere(lambda: None, lambda: None)
