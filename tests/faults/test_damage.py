"""Damaged checkpoints are detected, and the previous checkpoint is used."""

import itertools
import os
import random
import shutil
from pathlib import Path

import pytest

from qkv.training import RunFolder
from tests.faults.families import FAMILIES, write_data
from tests.training.distributed_runs import TRAIN, run_ranks


@pytest.fixture
def damaged_run_of(unbroken_run_of, tmp_path):
    """Returns a function that creates a finished run of a family, or of a GPT with FSDP shards for `shards`."""

    def create_run(family: str) -> RunFolder:
        if family == "shards":
            write_data(tmp_path, "gpt", batch_size=4)
            run_ranks(tmp_path, 2, (*TRAIN, "run", "--sharding", "fsdp"))
            assert len(list((tmp_path / "run").glob("checkpoints/step-00000013/shards/*"))) > 1
        else:
            shutil.copytree(unbroken_run_of(family).trained_folder, tmp_path / "run")
        return RunFolder(tmp_path / "run")

    return create_run


def list_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def is_detected(run: RunFolder, latest: int, *details: str) -> bool:
    """Returns True if the previous checkpoint is used and one message describes the damage of the latest."""
    messages: list[str] = []
    progress, _ = run.latest_valid_checkpoint(messages.append)
    previous = run.checkpoint_steps()[-2]
    return (
        progress.step == previous
        and len(messages) == 1
        and all(detail in messages[0] for detail in (str(run.checkpoint_folder(latest)), *details))
    )


def flip_bytes(run: RunFolder, n: int, tally) -> None:
    rng, latest = random.Random(0), run.checkpoint_steps()[-1]
    files = list_files(run.checkpoint_folder(latest))
    for path in rng.choices(files, weights=[path.stat().st_size for path in files], k=n):
        content = path.read_bytes()
        at, bit = rng.randrange(len(content)), 1 << rng.randrange(8)
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([content[at] ^ bit]))
        tally.add(f"{path.name} byte {at} bit {bit}", survived=is_detected(run, latest))
        path.write_bytes(content)
    assert run.latest_valid_checkpoint(pytest.fail)[0].step == latest


def truncate_files(run: RunFolder, n: int, tally) -> None:
    rng, latest = random.Random(1), run.checkpoint_steps()[-1]
    for path in rng.choices(list_files(run.checkpoint_folder(latest)), k=n):
        content = path.read_bytes()
        size = rng.randrange(len(content))
        os.truncate(path, size)
        tally.add(f"{path.name} truncated to {size}", survived=is_detected(run, latest, path.name))
        path.write_bytes(content)


def rearrange_files(run: RunFolder, tally) -> None:
    """Try missing, longer, additional, replaced and swapped files, and files of the previous checkpoint."""
    *_, previous, latest = run.checkpoint_steps()
    folder, backup = run.checkpoint_folder(latest), run.path / "backup"
    shutil.copytree(folder, backup)

    def attempt(fault: str, *details: str) -> None:
        tally.add(fault, survived=is_detected(run, latest, *details))
        shutil.rmtree(folder)
        shutil.copytree(backup, folder)

    files = list_files(folder)
    for path in files:
        path.unlink()
        attempt(f"{path.name} missing", path.name)
        path.write_bytes(path.read_bytes() + b"\n")
        attempt(f"{path.name} longer", path.name)
        path.unlink()
        path.mkdir()
        attempt(f"{path.name} is a folder")
        path.with_name("more" + path.suffix).write_bytes(b"?")
        attempt("additional file", "more")
        older = run.checkpoint_folder(previous) / path.relative_to(folder)
        if older.is_file() and older.read_bytes() != path.read_bytes():
            shutil.copy(older, path)
            attempt(f"{path.name} of the previous checkpoint")
    for first, second in itertools.combinations(files, 2):
        if first.read_bytes() != second.read_bytes():
            first_content, second_content = first.read_bytes(), second.read_bytes()
            first.write_bytes(second_content)
            second.write_bytes(first_content)
            attempt(f"{first.name} and {second.name} swapped")
    shutil.rmtree(backup)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_damaged_checkpoint_is_detected(damaged_run_of, family, tally):
    run = damaged_run_of(family)
    flip_bytes(run, 50, tally)
    truncate_files(run, 10, tally)
    rearrange_files(run, tally)


@pytest.mark.long
@pytest.mark.parametrize("family", [*FAMILIES, "shards"])
def test_five_thousand_flipped_bytes_are_all_detected(damaged_run_of, family, tally):
    flip_bytes(damaged_run_of(family), 5_000, tally)


@pytest.mark.long
@pytest.mark.parametrize("family", [*FAMILIES, "shards"])
def test_truncated_missing_and_swapped_files_are_all_detected(damaged_run_of, family, tally):
    run = damaged_run_of(family)
    truncate_files(run, 300, tally)
    rearrange_files(run, tally)
