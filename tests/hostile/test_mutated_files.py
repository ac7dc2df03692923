"""Randomly mutated files are read successfully or raise a one-line error."""

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.hostile.command_runner import run_commands
from tests.hostile.valid_files import VALID_FILES

N_LONG = 400
MAX_ATTEMPTS = 100


@pytest.fixture(scope="module")
def create_once(tmp_path_factory):
    folders: dict[str, Path] = {}

    def create(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("base")
            VALID_FILES[name].create(folders[name])
        return folders[name]

    return create


def mutate_until_different(data, mutation, generator) -> bytes:
    """Apply a mutation until the data change, because a mutation may have no effect by chance."""
    variants = (variant for _ in range(MAX_ATTEMPTS) if (variant := mutation(data, generator)) != data)
    variant = next(variants, None)
    assert variant is not None, f"no change in {MAX_ATTEMPTS} attempts"
    return variant


def mutated_copies(name: str, base: Path, folder: Path, n: int) -> list[Path]:
    """Create copies with one mutated file each, whose name is stored in `.changed`."""
    generator = random.Random(name)
    copies = []
    for i in range(n):
        pattern, mutation = generator.choice(list(VALID_FILES[name].mutations.items()))
        candidates = sorted(path for path in base.glob(pattern) if path.is_file())
        assert candidates, f"{name}: no file matches {pattern}"
        file = generator.choice(candidates)
        data = file.read_bytes()
        mutated = mutate_until_different(data, mutation, generator) if data else b"\0"
        copy = folder / str(i)
        shutil.copytree(base, copy)
        (copy / file.relative_to(base)).write_bytes(mutated)
        (copy / ".changed").write_text(str(file.relative_to(base)))
        copies.append(copy)
    return copies


def run_mutated_copies(name: str, base: Path, folder: Path, n: int) -> tuple[Counter, list[str]]:
    copies = mutated_copies(name, base, folder, n)
    original = shutil.copytree(base, folder / "good")
    results = run_commands([(copy, VALID_FILES[name].command) for copy in (original, *copies)])
    assert results[0].code == 0, results[0].err
    counts, faults = Counter(), []
    for copy, result in zip(copies, results[1:], strict=True):
        if result.code == 0 and "Traceback" not in result.err:
            counts["read"] += 1  # the mutated file is still valid
            shutil.rmtree(copy)
            continue
        counts["refused"] += 1
        counts["slowest ms"] = max(counts["slowest ms"], round(1000 * result.seconds))
        fault = result.find_fault([])
        if fault is None:
            shutil.rmtree(copy)
        else:
            faults.append(f"{copy} ({(copy / '.changed').read_text()}): {fault}")
    return counts, faults


@pytest.mark.parametrize("name", VALID_FILES)
def test_some_mutated_files_are_read_or_raise_a_one_line_error(name, create_once, tmp_path):
    _, faults = run_mutated_copies(name, create_once(name), tmp_path, 8)
    assert not faults, "\n".join(faults)


@pytest.mark.long
@pytest.mark.parametrize("name", VALID_FILES)
def test_hundreds_of_mutated_files_are_read_or_raise_a_one_line_error(name, create_once, tmp_path, record):
    counts, faults = run_mutated_copies(name, create_once(name), tmp_path, N_LONG)
    record(name, **counts, faults=len(faults))
    assert counts["refused"], f"{name}: all files were read; does {VALID_FILES[name].command} open the mutated file?"
    assert not faults, f"{len(faults)} of {counts}:\n" + "\n".join(faults)
