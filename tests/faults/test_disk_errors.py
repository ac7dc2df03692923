"""Disk errors at any write give a one-line error, and the run resumes from the last checkpoint."""

import errno
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from qkv.errors import DiskError
from qkv.training import open_run
from tests.failing_disk import failing_disk
from tests.faults.families import FAMILIES
from tests.training.processes import run_command, run_command_with_file_limit, run_process
from tests.training.runs import (
    build_cpu_trainer,
    checkpoint_contents,
    logged_metrics,
    resume_to_end,
    train_until_signal,
)

ERROR_NUMBERS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS)
MESSAGE = re.compile(r".+: .*[A-Z][\w/ -]+ \(\d+ bytes free\)")
STOPPED_AT = 4


@pytest.fixture(params=FAMILIES)
def stopped(request, unbroken_run_of, tmp_path_factory):
    """The uninterrupted run of a family, and one that a signal stopped after four steps."""
    torch.set_num_threads(1)  # like the uninterrupted run
    uninterrupted = unbroken_run_of(request.param)
    folder = uninterrupted.copy(tmp_path_factory.mktemp("stopped") / "run")
    train_until_signal(build_cpu_trainer(open_run(folder)), STOPPED_AT)
    return uninterrupted, folder


def resumed_trainer(folder: Path):
    trainer = build_cpu_trainer(open_run(folder))
    trainer.resume(pytest.fail)
    return trainer


def count_operations(folder: Path) -> list[str]:
    """Returns the file operations of the rest of the run."""
    trainer = resumed_trainer(folder)
    with failing_disk() as disk:
        trainer.train()
    return disk.operations


def survives(folder: Path, uninterrupted, at: int, number: int, *, name: str) -> bool:
    trainer = resumed_trainer(folder)
    try:
        with failing_disk(at, number, keeps_failing=number in (errno.ENOSPC, errno.EROFS)):
            trainer.train()
        # A failing mkdir is harmless if the folder exists. Every other error must be reported.
        if name != "mkdir" or trainer.progress.step != trainer.config.steps:
            return False
    except DiskError as error:
        if not MESSAGE.fullmatch(str(error)):
            return False
    if open_run(folder).run.latest_valid_checkpoint(pytest.fail)[0].step < STOPPED_AT:
        return False
    resume_to_end(folder)
    leftovers = [path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")]
    return (
        not leftovers
        and logged_metrics(folder) == uninterrupted.logged_metrics
        and checkpoint_contents(folder) == uninterrupted.checkpoint_contents
    )


def sweep(stopped, tmp_path, tally, *, numbers: Callable[[int], Iterable[int]]) -> None:
    """Let each file operation fail with the error numbers that `numbers` returns for it."""
    uninterrupted, folder = stopped
    shutil.copytree(folder, tmp_path / "counted")
    names = count_operations(tmp_path / "counted")
    assert names.count("rename") >= 2
    for at in range(1, len(names) + 1):
        for number in numbers(at):
            copy = tmp_path / f"{at}-{number}"
            shutil.copytree(folder, copy)
            survived = survives(copy, uninterrupted, at, number, name=names[at - 1])
            tally.add(f"{errno.errorcode[number]} at {at}, {names[at - 1]}", survived=survived)
            shutil.rmtree(copy)


def test_some_disk_errors_lose_only_the_steps_since_the_last_checkpoint(stopped, tmp_path, tally):
    sweep(stopped, tmp_path, tally, numbers=lambda at: () if at % 23 else (ERROR_NUMBERS[at // 23 % 4],))


@pytest.mark.long
def test_any_disk_error_loses_only_the_steps_since_the_last_checkpoint(stopped, tmp_path, tally):
    sweep(stopped, tmp_path, tally, numbers=lambda _at: ERROR_NUMBERS)


@pytest.mark.long
def test_a_file_size_limit_loses_only_the_steps_since_the_last_checkpoint(stopped, tmp_path, tally):
    uninterrupted, folder = stopped
    largest = max(
        path.stat().st_size for path in (uninterrupted.trained_folder / "checkpoints").rglob("*") if path.is_file()
    )
    for i in range(25):
        n_bytes, work_folder = 1500 + i * (largest - 1500) // 25, tmp_path / str(i)
        work_folder.mkdir()
        shutil.copytree(folder, work_folder / "run")
        arguments = ["train", "--resume", "run", "--device", "cpu"]
        code = run_process(run_command_with_file_limit, n_bytes, str(work_folder), arguments)
        stderr = (work_folder / "err").read_text()
        is_reported = code == 1 and "File too large (" in stderr and "Traceback" not in stderr
        done = run_process(run_command, str(work_folder), arguments) == 0
        same = (
            logged_metrics(work_folder / "run") == uninterrupted.logged_metrics
            and checkpoint_contents(work_folder / "run") == uninterrupted.checkpoint_contents
        )
        tally.add(f"{n_bytes} bytes of {largest}: {code} {stderr[-200:]}", survived=is_reported and done and same)
