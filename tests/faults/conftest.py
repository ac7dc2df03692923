"""Runs of every family to break, and the figures of those that survived."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from qkv.training import PreparedRun
from tests.faults.families import make_ready
from tests.training.processes import go_on_counted, run_to_end
from tests.training.runs import checkpoints, copy_of, curve


@dataclass(frozen=True)
class Unbroken:
    """A run as it is where nothing goes wrong."""

    prepared: PreparedRun
    """Nothing is trained yet."""
    whole: Path
    """Trained to its end, by a process of its own."""
    curve: list[dict[str, object]]
    checkpoints: dict[str, bytes]
    operations: list[str]
    """Every change of the disk, in order."""
    seconds: float

    def copy(self, folder: Path) -> Path:
        """To be trained from the beginning."""
        return copy_of(self.prepared, folder).run.path

    def is_equalled_by(self, folder: Path) -> bool:
        """To the last bit, once that run has been brought to its end; nothing half-written is left there."""
        if run_to_end(go_on_counted, str(folder), None, str(folder.parent / "report")) != 0:
            return False
        left_over = [path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")]
        return not left_over and curve(folder) == self.curve and checkpoints(folder) == self.checkpoints


@pytest.fixture(scope="session")
def unbroken_of(tmp_path_factory):
    """The unbroken run of a family, made when it is first asked for."""
    made: dict[str, Unbroken] = {}

    def of(family: str) -> Unbroken:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            prepared = make_ready(folder, family)
            copy_of(prepared, folder / "warm")
            assert run_to_end(go_on_counted, str(folder / "warm"), None, str(folder / "report")) == 0
            whole = copy_of(prepared, folder / "whole").run.path
            started = time.perf_counter()
            assert run_to_end(go_on_counted, str(whole), None, str(folder / "report")) == 0
            seconds = time.perf_counter() - started
            operations = json.loads((folder / "report").read_text())
            made[family] = Unbroken(prepared, whole, curve(whole), checkpoints(whole), operations, seconds)
        return made[family]

    return of


class Tally:
    """What was tried in one sweep, and what of it was not survived."""

    def __init__(self) -> None:
        self.tried = 0
        self.lost: list[str] = []

    def add(self, what: str, *, survived: bool) -> None:
        self.tried += 1
        if not survived:
            self.lost.append(what)


@pytest.fixture
def tally(request):
    """Red in the end if one was lost. Its figures go to the file that QKV_FIGURES names, a line of JSON a sweep."""
    counted, started = Tally(), time.perf_counter()
    yield counted
    seconds = time.perf_counter() - started
    if "QKV_FIGURES" in os.environ:
        figures = {"sweep": request.node.name, "tried": counted.tried, "lost": counted.lost}
        with Path(os.environ["QKV_FIGURES"]).open("a") as file:
            file.write(json.dumps({**figures, "seconds": round(seconds, 1)}) + "\n")
    assert counted.tried
    assert counted.lost == []
