"""A disk that is full, fails, forbids or is read-only at any write: one line, the checkpoint before, and going on."""

import errno
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from qkv.errors import DiskError
from qkv.training import open_run
from tests.disks import refusing
from tests.faults.families import FAMILIES
from tests.training.processes import command, command_within, run_to_end
from tests.training.runs import checkpoints, curve, go_on, stopped_after, trainer_of

NUMBERS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS)
LINE = re.compile(r".+: cannot (write \d+ bytes|be written): [A-Z][\w/ -]+ \(\d+ bytes free\)")
STOPPED_AT = 4


@pytest.fixture(params=FAMILIES)
def stopped(request, unbroken_of, tmp_path_factory):
    """A family's unbroken run, and one that a signal stopped after four steps."""
    torch.set_num_threads(1)  # as the unbroken one was made
    unbroken = unbroken_of(request.param)
    folder = unbroken.copy(tmp_path_factory.mktemp("stopped") / "run")
    stopped_after(trainer_of(open_run(folder)), STOPPED_AT)
    return unbroken, folder


def resumed(folder: Path):
    trainer = trainer_of(open_run(folder))
    trainer.resume(pytest.fail)
    return trainer


def operations_of(folder: Path) -> list[str]:
    """What the rest of the run asks of the disk."""
    trainer = resumed(folder)
    with refusing() as disk:
        trainer.train()
    return disk.names


def survives(folder: Path, unbroken, at: int, number: int, *, name: str) -> bool:
    trainer = resumed(folder)
    try:
        with refusing(at, number, stays=number in (errno.ENOSPC, errno.EROFS)):
            trainer.train()
        # Only a folder that is there already need not be made; all else that is refused must be said.
        if name != "mkdir" or trainer.progress.step != trainer.config.steps:
            return False
    except DiskError as error:
        if not LINE.fullmatch(str(error)):
            return False
    if open_run(folder).run.latest_valid_checkpoint(pytest.fail)[0].step < STOPPED_AT:
        return False
    go_on(folder)
    left_over = [path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")]
    return not left_over and curve(folder) == unbroken.curve and checkpoints(folder) == unbroken.checkpoints


def sweep(stopped, tmp_path, tally, *, numbers: Callable[[int], Iterable[int]]) -> None:
    """`numbers`: of an operation, the errors that it is answered with."""
    unbroken, folder = stopped
    shutil.copytree(folder, tmp_path / "counted")
    names = operations_of(tmp_path / "counted")
    assert names.count("rename") >= 2
    for at in range(1, len(names) + 1):
        for number in numbers(at):
            copy = tmp_path / f"{at}-{number}"
            shutil.copytree(folder, copy)
            is_well = survives(copy, unbroken, at, number, name=names[at - 1])
            tally.add(f"{errno.errorcode[number]} at {at}, {names[at - 1]}", survived=is_well)
            shutil.rmtree(copy)


def test_a_disk_that_refuses_some_of_the_writes_costs_nothing_but_the_steps_since(stopped, tmp_path, tally):
    sweep(stopped, tmp_path, tally, numbers=lambda at: () if at % 23 else (NUMBERS[at // 23 % 4],))


@pytest.mark.long
def test_a_disk_that_refuses_any_write_costs_nothing_but_the_steps_since(stopped, tmp_path, tally):
    sweep(stopped, tmp_path, tally, numbers=lambda _at: NUMBERS)


@pytest.mark.long
def test_a_file_that_the_system_cuts_off_costs_nothing_but_the_steps_since(stopped, tmp_path, tally):
    unbroken, folder = stopped
    largest = max(path.stat().st_size for path in (unbroken.whole / "checkpoints").rglob("*") if path.is_file())
    for i in range(25):
        n_bytes, place = 1500 + i * (largest - 1500) // 25, tmp_path / str(i)
        place.mkdir()
        shutil.copytree(folder, place / "run")
        arguments = ["train", "--resume", "run", "--device", "cpu"]
        code = run_to_end(command_within, n_bytes, str(place), arguments)
        said = (place / "err").read_text()
        is_said = code == 1 and "File too large (" in said and "Traceback" not in said
        done = run_to_end(command, str(place), arguments) == 0
        same = curve(place / "run") == unbroken.curve and checkpoints(place / "run") == unbroken.checkpoints
        tally.add(f"{n_bytes} bytes of {largest}: {code} {said[-200:]}", survived=is_said and done and same)
