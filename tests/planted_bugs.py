"""Does a test turn red when a known bug is planted? `python tests/planted_bugs.py [WORD …]`, WORD part of a name.

Each bug is a small change of the source, made in a copy; the few tests named with it run on that copy. A bug that
no test sees, or a change that no longer fits the source, ends in status 1.
"""

import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

# Imported once, here: each bug's own process is forked from this one and finds them there.
import hypothesis.strategies
import matplotlib.figure
import numpy as np
import pydantic
import pytest
import tokenizers
import torch._dynamo
import transformers

from bugs import BUGS, Bug  # isort: skip - beside this file

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "qkv"
SHARED = (hypothesis, matplotlib.figure, np, pydantic, tokenizers, torch, transformers)
UNCHECKED = "addopts=--import-mode=importlib"
"""Not the checks of shapes and types at run time: what a test claims must see the bug, and it takes a sixth."""
N_AT_ONCE = 2


@dataclass(eq=False)  # pytest wants its plugins hashable
class Red:
    """Listens to pytest: which tests failed, in their own body."""

    failed: list[str]

    def pytest_sessionstart(self) -> None:
        from hypothesis import Phase, settings

        # A failing example need not be made small: that it fails is enough.
        settings.register_profile("planted", phases=[Phase.explicit, Phase.generate])
        settings.load_profile("planted")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.when == "call":
            self.failed.append(report.nodeid.removeprefix("tests/"))


def planted(bug: Bug, folder: Path) -> str | None:
    """Copy the source with the bug in it; or say why it cannot be planted."""
    shutil.copytree(SOURCE, folder / "qkv", ignore=shutil.ignore_patterns("__pycache__", "zoo"))
    (folder / "qkv" / "zoo").symlink_to(SOURCE / "zoo")  # weights, in which no bug is planted
    for file, old, new in bug.edits:
        path = folder / "qkv" / file
        text = path.read_text(encoding="utf-8")
        if text.count(old) != 1:
            return f"no longer fits: {text.count(old)} places in {file} read {old!r}"
        path.write_text(text.replace(old, new), encoding="utf-8")
    return None


def run_tests(folder: Path, tests: tuple[str, ...]) -> tuple[int, list[str]]:
    """pytest's status and the tests that failed, with `qkv` taken from the folder."""
    os.chdir(ROOT)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    torch.set_num_threads(1)
    red = Red([])
    arguments = ["-o", UNCHECKED, "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=line"]
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # plugins that are imported already
    with (folder / "output").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        status = pytest.main([*arguments, *(f"tests/{test}" for test in tests)], plugins=[red])
        sys.stdout.flush()
    import qkv

    assert Path(qkv.__file__).is_relative_to(folder), f"the tests ran on {qkv.__file__}"
    return int(status), red.failed


def verdict(bug: Bug) -> tuple[str, str]:
    """("caught", by which test), or what went wrong."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        problem = planted(bug, folder)
        if problem is not None:
            return "stale", problem
        status, failed = run_tests(folder, bug.tests)
        if status == pytest.ExitCode.TESTS_FAILED and failed:
            return "caught", failed[0]
        if status == pytest.ExitCode.OK:
            return "MISSED", "all green: " + ", ".join(bug.tests)
        return "broken", (folder / "output").read_text()[-600:]


def all_green(bugs: list[Bug]) -> tuple[str, str]:
    """Without a bug the same tests pass; otherwise a red one would prove nothing."""
    tests = tuple(dict.fromkeys(test for bug in bugs for test in bug.tests))
    healthy = Bug(name="no bug", edits=(), tests=tests)
    kind, what = verdict(healthy)
    return ("green", f"{len(tests)} tests") if kind == "MISSED" else ("broken", f"without any bug: {kind}: {what}")


def judged(bug: Bug | list[Bug]) -> tuple[str, str, str]:
    if isinstance(bug, list):
        return "no bug", *all_green(bug)
    return bug.name, *verdict(bug)


def main(words: list[str]) -> int:
    bugs = [bug for bug in BUGS if not words or any(word in bug.name for word in words)]
    if not bugs:
        print(f"no bug is named {' or '.join(words)}; known: {', '.join(bug.name for bug in BUGS)}")
        return 2
    started = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(N_AT_ONCE, maxtasksperchild=1) as pool:
        results = []
        for name, kind, what in pool.imap_unordered(judged, [bugs, *bugs], chunksize=1):
            print(f"{kind:7} {name:45} {what}", flush=True)
            results.append(kind)
    n_caught = results.count("caught")
    print(f"{n_caught} of {len(bugs)} planted bugs caught in {time.perf_counter() - started:.0f} s")
    return int(n_caught != len(bugs) or "green" not in results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
