"""Fixtures with uninterrupted runs of every family, and a tally of survived faults."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from qkv.training import PreparedRun
from tests.faults.families import prepare_small_run
from tests.training.processes import resume_counting_operations, run_process
from tests.training.runs import checkpoint_contents, copy_run, logged_metrics


@dataclass(frozen=True)
class UninterruptedRun:
    """A run without any fault."""

    prepared: PreparedRun
    """The prepared run before training."""
    trained_folder: Path
    """Folder of the run that a child process trained to its end."""
    logged_metrics: list[dict[str, object]]
    checkpoint_contents: dict[str, bytes]
    operations: list[str]
    """All file operations, in order."""
    seconds: float

    def copy(self, folder: Path) -> Path:
        """Copy the prepared run, to be trained from the start."""
        return copy_run(self.prepared, folder).run.path

    def is_reproduced_by(self, folder: Path) -> bool:
        """Resume the run in `folder` to its end. Returns True if it is bit-identical and leaves no incomplete files."""
        if run_process(resume_counting_operations, str(folder), None, str(folder.parent / "report")) != 0:
            return False
        leftovers = [path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")]
        return (
            not leftovers
            and logged_metrics(folder) == self.logged_metrics
            and checkpoint_contents(folder) == self.checkpoint_contents
        )


@pytest.fixture(scope="session")
def unbroken_run_of(tmp_path_factory):
    """Returns a function that trains the uninterrupted run of a family on its first use."""
    runs: dict[str, UninterruptedRun] = {}

    def train_family(family: str) -> UninterruptedRun:
        if family not in runs:
            folder = tmp_path_factory.mktemp(family)
            prepared = prepare_small_run(folder, family)
            copy_run(prepared, folder / "warm")
            assert run_process(resume_counting_operations, str(folder / "warm"), None, str(folder / "report")) == 0
            trained_folder = copy_run(prepared, folder / "trained").run.path
            started = time.perf_counter()
            assert run_process(resume_counting_operations, str(trained_folder), None, str(folder / "report")) == 0
            seconds = time.perf_counter() - started
            operations = json.loads((folder / "report").read_text())
            runs[family] = UninterruptedRun(
                prepared,
                trained_folder,
                logged_metrics(trained_folder),
                checkpoint_contents(trained_folder),
                operations,
                seconds,
            )
        return runs[family]

    return train_family


class Tally:
    """Counts the faults of a sweep and lists those that a run did not survive."""

    def __init__(self) -> None:
        self.tried = 0
        self.lost: list[str] = []

    def add(self, fault: str, *, survived: bool) -> None:
        self.tried += 1
        if not survived:
            self.lost.append(fault)


@pytest.fixture
def tally(request):
    """Fails the test if a fault was not survived. If QKV_FIGURES is set, a JSON line per sweep is appended to it."""
    result, started = Tally(), time.perf_counter()
    yield result
    seconds = time.perf_counter() - started
    if "QKV_FIGURES" in os.environ:
        figures = {"sweep": request.node.name, "tried": result.tried, "lost": result.lost}
        with Path(os.environ["QKV_FIGURES"]).open("a") as file:
            file.write(json.dumps({**figures, "seconds": round(seconds, 1)}) + "\n")
    assert result.tried
    assert result.lost == []
