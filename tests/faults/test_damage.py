"""A checkpoint of which any byte, file or name is not as it was written is noticed, and the one before is taken."""

import itertools
import os
import random
import shutil
from pathlib import Path

import pytest

from qkv.training import RunFolder
from tests.faults.families import FAMILIES, write_data
from tests.training.several import TRAIN, run_ranks


@pytest.fixture
def damaged_of(unbroken_of, tmp_path):
    """A finished run of a family, to be damaged; `shards`: a GPT trained by two processes, each with its own pieces."""

    def of(family: str) -> RunFolder:
        if family == "shards":
            write_data(tmp_path, "gpt", batch_size=4)
            run_ranks(tmp_path, 2, (*TRAIN, "run", "--sharding", "fsdp"))
            assert len(list((tmp_path / "run").glob("checkpoints/step-00000013/pieces/*"))) > 1
        else:
            shutil.copytree(unbroken_of(family).whole, tmp_path / "run")
        return RunFolder(tmp_path / "run")

    return of


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def is_noticed(run: RunFolder, newest: int, *words: str) -> bool:
    """The checkpoint before is taken, and one line says what is wrong with the newest."""
    said: list[str] = []
    progress, _ = run.latest_valid_checkpoint(said.append)
    before = run.checkpoint_steps()[-2]
    return progress.step == before and len(said) == 1 and all(w in said[0] for w in (str(run.checkpoint_folder(newest)), *words))


def flip_bytes(run: RunFolder, n: int, tally) -> None:
    chance, newest = random.Random(0), run.checkpoint_steps()[-1]
    files = files_of(run.checkpoint_folder(newest))
    for path in chance.choices(files, weights=[path.stat().st_size for path in files], k=n):
        whole = path.read_bytes()
        at, bit = chance.randrange(len(whole)), 1 << chance.randrange(8)
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([whole[at] ^ bit]))
        tally.add(f"{path.name} byte {at} bit {bit}", survived=is_noticed(run, newest))
        path.write_bytes(whole)
    assert run.latest_valid_checkpoint(pytest.fail)[0].step == newest


def cut_short(run: RunFolder, n: int, tally) -> None:
    chance, newest = random.Random(1), run.checkpoint_steps()[-1]
    for path in chance.choices(files_of(run.checkpoint_folder(newest)), k=n):
        whole = path.read_bytes()
        size = chance.randrange(len(whole))
        os.truncate(path, size)
        tally.add(f"{path.name} cut to {size}", survived=is_noticed(run, newest, path.name))
        path.write_bytes(whole)


def rearrange(run: RunFolder, tally) -> None:
    """Missing, grown, replaced by a folder, one too many, swapped with another, of the checkpoint before."""
    *_, before, newest = run.checkpoint_steps()
    folder, aside = run.checkpoint_folder(newest), run.path / "aside"
    shutil.copytree(folder, aside)

    def attempt(what: str, *words: str) -> None:
        tally.add(what, survived=is_noticed(run, newest, *words))
        shutil.rmtree(folder)
        shutil.copytree(aside, folder)

    files = files_of(folder)
    for path in files:
        path.unlink()
        attempt(f"{path.name} missing", path.name)
        path.write_bytes(path.read_bytes() + b"\n")
        attempt(f"{path.name} grown", path.name)
        path.unlink()
        path.mkdir()
        attempt(f"{path.name} is a folder")
        path.with_name("more" + path.suffix).write_bytes(b"?")
        attempt("one too many", "more")
        older = run.checkpoint_folder(before) / path.relative_to(folder)
        if older.is_file() and older.read_bytes() != path.read_bytes():
            shutil.copy(older, path)
            attempt(f"{path.name} of the checkpoint before")
    for one, other in itertools.combinations(files, 2):
        if one.read_bytes() != other.read_bytes():
            mine, theirs = one.read_bytes(), other.read_bytes()
            one.write_bytes(theirs)
            other.write_bytes(mine)
            attempt(f"{one.name} and {other.name} swapped")
    shutil.rmtree(aside)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_damaged_checkpoint_is_noticed(damaged_of, family, tally):
    run = damaged_of(family)
    flip_bytes(run, 50, tally)
    cut_short(run, 10, tally)
    rearrange(run, tally)


@pytest.mark.long
@pytest.mark.parametrize("family", [*FAMILIES, "shards"])
def test_no_flipped_byte_of_five_thousand_goes_unseen(damaged_of, family, tally):
    flip_bytes(damaged_of(family), 5_000, tally)


@pytest.mark.long
@pytest.mark.parametrize("family", [*FAMILIES, "shards"])
def test_no_cut_missing_swapped_or_mixed_file_goes_unseen(damaged_of, family, tally):
    run = damaged_of(family)
    cut_short(run, 300, tally)
    rearrange(run, tally)
