"""`kill -9` at any moment: the resumed run is the unbroken one, to the last bit, in every family."""

import random
import time
from pathlib import Path

import pytest

from tests.faults.families import FAMILIES
from tests.training.processes import go_on_counted, run_to_end, start
from tests.training.runs import checkpoints, copy_of, curve


@pytest.fixture(params=FAMILIES)
def unbroken(request, unbroken_of):
    return unbroken_of(request.param)


def kill_at_operation(folder: Path, number: int) -> None:
    assert run_to_end(go_on_counted, str(folder), number, str(folder.parent / "report")) == -9


def kill_after(folder: Path, seconds: float) -> None:
    process = start(go_on_counted, str(folder), None, str(folder.parent / "report"))
    time.sleep(seconds)
    process.kill()
    process.join()


def numbers_of(unbroken, name: str) -> list[int]:
    return [number for number, there in enumerate(unbroken.operations, 1) if there == name]


def test_the_operations_of_a_save_are_all_seen(unbroken):
    # Five saves of six files and two folders or more, each synced; if a hook missed them, kills would prove nothing.
    assert len(numbers_of(unbroken, "save: fsync")) >= 5 * 8
    assert len(numbers_of(unbroken, "save: os.rename")) >= 5
    assert numbers_of(unbroken, "save: os.remove")


@pytest.mark.parametrize(("name", "which"), [("save: half of the weights", 5), ("save: os.rename", 2)])
def test_a_kill_inside_a_save_changes_nothing(unbroken, tmp_path, name, which):
    folder = unbroken.copy(tmp_path / "run")
    kill_at_operation(folder, numbers_of(unbroken, name)[which])
    assert unbroken.is_equalled_by(folder)


def test_a_chain_of_kills_changes_nothing(unbroken_of, tmp_path):
    unbroken = unbroken_of("gpt")
    folder = unbroken.copy(tmp_path / "run")
    for number in (2, 40, 61, 90):
        kill_at_operation(folder, number)
    assert unbroken.is_equalled_by(folder)


@pytest.mark.long
def test_a_kill_at_every_operation_changes_nothing(unbroken, tmp_path, tally):
    for number, name in enumerate(unbroken.operations, 1):
        folder = unbroken.copy(tmp_path / f"{number}" / "run")
        kill_at_operation(folder, number)
        tally.add(f"operation {number}, {name}", survived=unbroken.is_equalled_by(folder))


@pytest.mark.long
def test_kills_at_random_moments_change_nothing(unbroken, tmp_path, tally):
    chance = random.Random(0)
    for i in range(30):
        folder, moment = unbroken.copy(tmp_path / f"{i}" / "run"), chance.uniform(0, unbroken.seconds)
        kill_after(folder, moment)
        tally.add(f"after {moment} s", survived=unbroken.is_equalled_by(folder))


@pytest.mark.long
def test_twenty_kills_in_a_row_change_nothing(unbroken, tmp_path, tally):
    longer = {"steps": 101, "eval_every": 17}
    whole = copy_of(unbroken.prepared, tmp_path / "whole", **longer).run.path
    folder = copy_of(unbroken.prepared, tmp_path / "run", **longer).run.path
    assert run_to_end(go_on_counted, str(whole), None, str(tmp_path / "report")) == 0
    chance = random.Random(1)
    for _ in range(20):  # a save takes about 35 operations, so that most of these runs get on by a few steps
        kill_at_operation(folder, chance.randrange(1, 80))
    assert run_to_end(go_on_counted, str(folder), None, str(tmp_path / "report")) == 0
    same = curve(folder) == curve(whole) and checkpoints(folder) == checkpoints(whole)
    tally.add("twenty kills", survived=same)
