"""Tests for the data fingerprints of runs."""

import pytest

from qkv.errors import RunError
from qkv.training import checkpoint, open_run, prepare_run
from tests.training.runs import copy_run, recipe, resume_to_end, write_text


@pytest.fixture
def folder(prepared, tmp_path):
    return copy_run(prepared, tmp_path / "run").run.path


def test_one_changed_byte_raises_an_error_with_both_hashes(folder):
    tokens = folder / "data" / "train" / "tokens-00000.bin"
    content = tokens.read_bytes()
    tokens.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    with pytest.raises(
        RunError, match=rf"tokens-00000\.bin: .*{len(content):,} bytes, hash \w{{16}}.*{len(content):,} bytes"
    ):
        resume_to_end(folder)
    tokens.write_bytes(content)
    open_run(folder)


def test_the_store_of_another_text_raises_an_error(folder, tmp_path):
    write_text(tmp_path / "text.txt", 29)
    other = prepare_run(recipe(), tmp_path / "other", tmp_path, progress=lambda _label: lambda _done, _all: None)
    (folder / "data").rename(tmp_path / "aside")
    (other.run.path / "data").rename(folder / "data")
    with pytest.raises(RunError, match=r"[\d,]+ bytes, hash \w+.*[\d,]+ bytes, hash \w+$"):
        open_run(folder)


def test_a_missing_file_raises_an_error(folder):
    (folder / "data" / "train" / "index.json").unlink()
    with pytest.raises(RunError, match=r"train/index\.json: .*[\d,]+ bytes, hash \w+"):
        open_run(folder)


def test_both_ends_of_a_large_file_are_hashed(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FULL_HASH_LIMIT", 10)
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "a.bin"
    for at, is_hashed in ((0, True), (4, True), (5, False), (11, False), (12, True), (16, True)):
        file.write_bytes(bytes(17))
        checkpoint.record_fingerprints(tmp_path, tmp_path / "data")
        file.write_bytes(bytes(at) + b"x" + bytes(16 - at))
        if is_hashed:
            with pytest.raises(RunError, match=r"a\.bin: .*17 bytes"):
                checkpoint.check_fingerprints(tmp_path)
        else:
            checkpoint.check_fingerprints(tmp_path)


def test_a_run_without_fingerprints_can_be_resumed(folder):
    (folder / "data.json").unlink()
    open_run(folder)
