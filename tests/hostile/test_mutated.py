"""Thousands of files changed by chance: each is read all the same, or refused in one line."""

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.hostile.bases import BASES
from tests.hostile.opening import open_all

N_LONG = 400
MOST_TRIES = 100


@pytest.fixture(scope="module")
def made_of(tmp_path_factory):
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("base")
            BASES[name].make(made[name])
        return made[name]

    return of


def changed(data, change, chance) -> bytes:
    """Other bytes than before; a change may by chance make none."""
    others = (other for _ in range(MOST_TRIES) if (other := change(data, chance)) != data)
    other = next(others, None)
    assert other is not None, f"no change in {MOST_TRIES} tries"
    return other


def changed_copies(name: str, base: Path, folder: Path, n: int) -> list[Path]:
    """Copies of the base, each with one file changed; the file's name is kept in `.changed`."""
    chance = random.Random(name)
    copies = []
    for i in range(n):
        pattern, change = chance.choice(list(BASES[name].changes.items()))
        found = sorted(path for path in base.glob(pattern) if path.is_file())
        assert found, f"{name}: no file is named {pattern}"
        file = chance.choice(found)
        data = file.read_bytes()
        bad = changed(data, change, chance) if data else b"\0"
        copy = folder / str(i)
        shutil.copytree(base, copy)
        (copy / file.relative_to(base)).write_bytes(bad)
        (copy / ".changed").write_text(str(file.relative_to(base)))
        copies.append(copy)
    return copies


def sweep(name: str, base: Path, folder: Path, n: int) -> tuple[Counter, list[str]]:
    copies = changed_copies(name, base, folder, n)
    good = shutil.copytree(base, folder / "good")
    outcomes = open_all([(place, BASES[name].command) for place in (good, *copies)])
    assert outcomes[0].code == 0, outcomes[0].err
    counts, faults = Counter(), []
    for copy, outcome in zip(copies, outcomes[1:], strict=True):
        if outcome.code == 0 and "Traceback" not in outcome.err:
            counts["read"] += 1  # what was changed is something that any file of this kind may hold
            shutil.rmtree(copy)
            continue
        counts["refused"] += 1
        counts["slowest ms"] = max(counts["slowest ms"], round(1000 * outcome.seconds))
        fault = outcome.fault([])
        if fault is None:
            shutil.rmtree(copy)
        else:
            faults.append(f"{copy} ({(copy / '.changed').read_text()}): {fault}")
    return counts, faults


@pytest.mark.parametrize("name", BASES)
def test_some_changed_files_are_refused_in_one_line(name, made_of, tmp_path):
    _, faults = sweep(name, made_of(name), tmp_path, 8)
    assert not faults, "\n".join(faults)


@pytest.mark.long
@pytest.mark.parametrize("name", BASES)
def test_hundreds_of_changed_files_are_refused_in_one_line(name, made_of, tmp_path, record):
    counts, faults = sweep(name, made_of(name), tmp_path, N_LONG)
    record(name, **counts, faults=len(faults))
    assert counts["refused"], f"{name}: all were read; does {BASES[name].command} open what was changed?"
    assert not faults, f"{len(faults)} of {counts}:\n" + "\n".join(faults)
