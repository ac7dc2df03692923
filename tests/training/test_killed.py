"""`kill -9` at any moment: the resumed run is the unbroken one, to the last bit."""

import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from qkv.training import Prepared
from tests.training.processes import go_on_counted, run_to_end, start
from tests.training.runs import checkpoints, copy_of, curve, make_ready


@dataclass(frozen=True)
class Unbroken:
    prepared: Prepared
    curve: list[dict[str, object]]
    checkpoints: dict[str, bytes]
    operations: list[str]
    seconds: float


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Unbroken:
    folder = tmp_path_factory.mktemp("unbroken")
    prepared = make_ready(folder)
    copy_of(prepared, folder / "warm")
    assert run_to_end(go_on_counted, str(folder / "warm"), None, str(folder / "report")) == 0
    whole = copy_of(prepared, folder / "whole").run.path
    started = time.perf_counter()
    assert run_to_end(go_on_counted, str(whole), None, str(folder / "report")) == 0
    seconds = time.perf_counter() - started
    operations = json.loads((folder / "report").read_text())
    return Unbroken(prepared, curve(whole), checkpoints(whole), operations, seconds)


def killed_at_operation(folder: Path, number: int) -> None:
    assert run_to_end(go_on_counted, str(folder), number, str(folder.parent / "report")) == -9


def killed_after(folder: Path, seconds: float) -> None:
    process = start(go_on_counted, str(folder), None, str(folder.parent / "report"))
    time.sleep(seconds)
    process.kill()
    process.join()


def is_unbroken(folder: Path, unbroken: Unbroken) -> bool:
    assert run_to_end(go_on_counted, str(folder), None, str(folder.parent / "report")) == 0
    left_over = [path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")]
    return not left_over and curve(folder) == unbroken.curve and checkpoints(folder) == unbroken.checkpoints


def numbers_of(unbroken: Unbroken, name: str) -> list[int]:
    return [number for number, there in enumerate(unbroken.operations, 1) if there == name]


def test_the_operations_of_a_save_are_all_seen(unbroken):
    # Five saves of seven files and two folders, each synced; if a hook missed them, the kills would prove nothing.
    assert len(numbers_of(unbroken, "save: fsync")) >= 5 * 9
    assert len(numbers_of(unbroken, "save: os.rename")) >= 5
    assert numbers_of(unbroken, "save: os.remove")


@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("save: half of the weights", 0),
        ("save: half of the weights", 5),
        ("save: os.rename", 2),
        ("save: os.remove", 3),
        ("save: fsync", -1),
    ],
)
def test_a_kill_inside_a_save_changes_nothing(unbroken, tmp_path, name, which):
    folder = copy_of(unbroken.prepared, tmp_path / "run").run.path
    killed_at_operation(folder, numbers_of(unbroken, name)[which])
    assert is_unbroken(folder, unbroken)


def test_a_chain_of_kills_changes_nothing(unbroken, tmp_path):
    folder = copy_of(unbroken.prepared, tmp_path / "run").run.path
    for number in (2, 40, 61, 90):
        killed_at_operation(folder, number)
    assert is_unbroken(folder, unbroken)


@pytest.mark.long
def test_fifty_kills_at_random_moments_change_nothing(unbroken, tmp_path):
    chance = random.Random(0)
    in_save = [number for number, name in enumerate(unbroken.operations, 1) if name.startswith("save")]
    for i, number in enumerate(chance.sample(in_save, 20)):
        folder = copy_of(unbroken.prepared, tmp_path / f"operation-{i}").run.path
        killed_at_operation(folder, number)
        assert is_unbroken(folder, unbroken), f"killed at operation {number}, {unbroken.operations[number - 1]}"
    for i in range(30):
        folder = copy_of(unbroken.prepared, tmp_path / f"moment-{i}").run.path
        moment = chance.uniform(0, unbroken.seconds)
        killed_after(folder, moment)
        assert is_unbroken(folder, unbroken), f"killed after {moment} s"


@pytest.mark.long
def test_twenty_kills_in_a_row_change_nothing(unbroken, tmp_path):
    longer = {"steps": 101, "evaluate_every": 17}
    whole = copy_of(unbroken.prepared, tmp_path / "whole", **longer).run.path
    folder = copy_of(unbroken.prepared, tmp_path / "run", **longer).run.path
    assert run_to_end(go_on_counted, str(whole), None, str(tmp_path / "report")) == 0
    chance = random.Random(1)
    for _ in range(20):  # a save takes about 35 operations, so that most of these runs get on by a few steps
        killed_at_operation(folder, chance.randrange(1, 80))
    assert run_to_end(go_on_counted, str(folder), None, str(tmp_path / "report")) == 0
    assert curve(folder) == curve(whole)
    assert checkpoints(folder) == checkpoints(whole)
