"""A run that was killed at any time resumes to a bit-identical result, in every family."""

import random
import time
from pathlib import Path

import pytest

from tests.faults.families import FAMILIES
from tests.training.processes import resume_counting_operations, run_process, start_process
from tests.training.runs import checkpoint_contents, copy_run, logged_metrics


@pytest.fixture(params=FAMILIES)
def uninterrupted(request, unbroken_run_of):
    return unbroken_run_of(request.param)


def kill_at_operation(folder: Path, number: int) -> None:
    assert run_process(resume_counting_operations, str(folder), number, str(folder.parent / "report")) == -9


def kill_after(folder: Path, seconds: float) -> None:
    process = start_process(resume_counting_operations, str(folder), None, str(folder.parent / "report"))
    time.sleep(seconds)
    process.kill()
    process.join()


def operation_numbers(uninterrupted, name: str) -> list[int]:
    return [number for number, operation in enumerate(uninterrupted.operations, 1) if operation == name]


def test_all_file_operations_of_a_save_are_counted(uninterrupted):
    # Five saves of at least six files and two folders, each with an fsync. If hooks missed some, kills would prove
    # nothing.
    assert len(operation_numbers(uninterrupted, "save: fsync")) >= 5 * 8
    assert len(operation_numbers(uninterrupted, "save: os.rename")) >= 5
    assert operation_numbers(uninterrupted, "save: os.remove")


@pytest.mark.parametrize(("name", "which"), [("save: half of the weights", 5), ("save: os.rename", 2)])
def test_a_kill_during_a_save_does_not_change_the_run(uninterrupted, tmp_path, name, which):
    folder = uninterrupted.copy(tmp_path / "run")
    kill_at_operation(folder, operation_numbers(uninterrupted, name)[which])
    assert uninterrupted.is_reproduced_by(folder)


def test_several_kills_do_not_change_the_run(unbroken_run_of, tmp_path):
    uninterrupted = unbroken_run_of("gpt")
    folder = uninterrupted.copy(tmp_path / "run")
    for number in (2, 40, 61, 90):
        kill_at_operation(folder, number)
    assert uninterrupted.is_reproduced_by(folder)


@pytest.mark.long
def test_a_kill_at_any_file_operation_does_not_change_the_run(uninterrupted, tmp_path, tally):
    for number, name in enumerate(uninterrupted.operations, 1):
        folder = uninterrupted.copy(tmp_path / f"{number}" / "run")
        kill_at_operation(folder, number)
        tally.add(f"operation {number}, {name}", survived=uninterrupted.is_reproduced_by(folder))


@pytest.mark.long
def test_kills_at_random_times_do_not_change_the_run(uninterrupted, tmp_path, tally):
    rng = random.Random(0)
    for i in range(30):
        folder, moment = uninterrupted.copy(tmp_path / f"{i}" / "run"), rng.uniform(0, uninterrupted.seconds)
        kill_after(folder, moment)
        tally.add(f"after {moment} s", survived=uninterrupted.is_reproduced_by(folder))


@pytest.mark.long
def test_twenty_kills_in_a_row_do_not_change_the_run(uninterrupted, tmp_path, tally):
    longer = {"steps": 101, "eval_every": 17}
    expected = copy_run(uninterrupted.prepared, tmp_path / "expected", **longer).run.path
    folder = copy_run(uninterrupted.prepared, tmp_path / "run", **longer).run.path
    assert run_process(resume_counting_operations, str(expected), None, str(tmp_path / "report")) == 0
    rng = random.Random(1)
    for _ in range(20):  # a save takes about 35 operations, so most of these runs advance by a few steps
        kill_at_operation(folder, rng.randrange(1, 80))
    assert run_process(resume_counting_operations, str(folder), None, str(tmp_path / "report")) == 0
    same = logged_metrics(folder) == logged_metrics(expected) and checkpoint_contents(folder) == checkpoint_contents(
        expected
    )
    tally.add("twenty kills", survived=same)
