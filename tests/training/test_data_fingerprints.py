"""A run goes on with the data it began with, or not at all."""

import pytest

from qkv.errors import RunError
from qkv.training import data_fingerprints, open_run, prepare_run
from tests.training.runs import copy_of, go_on, recipe, write_text


@pytest.fixture
def folder(prepared, tmp_path):
    return copy_of(prepared, tmp_path / "run").run.path


def test_one_byte_of_the_tokens_that_changed_is_said_with_both_hashes(folder):
    tokens = folder / "data" / "train" / "tokens-00000.bin"
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:])
    said = rf"tokens-00000\.bin: is {len(whole):,} bytes, hash \w{{16}}; when the run began it was {len(whole):,} bytes"
    with pytest.raises(RunError, match=said):
        go_on(folder)
    tokens.write_bytes(whole)
    open_run(folder)


def test_another_texts_store_is_refused_though_it_is_whole(folder, tmp_path):
    write_text(tmp_path / "text.txt", 29)
    other = prepare_run(recipe(), tmp_path / "other", tmp_path, progress=lambda _label: lambda _done, _all: None)
    (folder / "data").rename(tmp_path / "aside")
    (other.run.path / "data").rename(folder / "data")
    with pytest.raises(RunError, match=r"is [\d,]+ bytes, hash \w+; when the run began it was [\d,]+ bytes, hash \w+$"):
        open_run(folder)


def test_a_file_that_is_gone_is_said(folder):
    (folder / "data" / "train" / "index.json").unlink()
    with pytest.raises(RunError, match=r"train/index\.json: is not there; when the run began it was"):
        open_run(folder)


def test_of_a_large_file_both_ends_are_hashed(tmp_path, monkeypatch):
    monkeypatch.setattr(data_fingerprints, "FULL_HASH_LIMIT", 10)
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "a.bin"
    for at, is_seen in ((0, True), (4, True), (5, False), (11, False), (12, True), (16, True)):
        file.write_bytes(bytes(17))
        data_fingerprints.record_fingerprints(tmp_path, tmp_path / "data")
        file.write_bytes(bytes(at) + b"x" + bytes(16 - at))
        if is_seen:
            with pytest.raises(RunError, match=r"a\.bin: is 17 bytes"):
                data_fingerprints.check_fingerprints(tmp_path)
        else:
            data_fingerprints.check_fingerprints(tmp_path)


def test_a_run_without_a_record_goes_on(folder):
    (folder / "data.json").unlink()
    open_run(folder)
