"""`qkv data prepare` and `qkv data show`: stores, batches and errors."""

import errno
import json
import os

import pytest

from qkv.data import TokenStore
from qkv.text import save_tokenizer
from tests.cli.answers import assert_only_error
from tests.data.stores import TEXTS, small_store, tokenizer, write_texts


def test_prepare_with_a_tokenizer(command, tmp_path):
    paths = write_texts(tmp_path / "texts")
    save_tokenizer(tokenizer(), tmp_path / "tokenizer")
    options = ["--out", tmp_path / "new", "--tokenizer", tmp_path / "tokenizer", "--workers", 2]
    answer = command("data", "prepare", *paths, *options)
    assert answer.status == 0
    store = TokenStore.open(tmp_path / "new", verify=True)
    assert answer.out == (
        f"{tmp_path / 'new'}: 23 documents, {store.n_tokens:,} tokens, {store.n_bytes:,} bytes, "
        "vocabulary size 277, 1 shards\n"
    )
    assert "tokens/s" in answer.err


def test_prepare_trains_a_tokenizer_by_default(command, tmp_path):
    paths = write_texts(tmp_path / "texts")
    answer = command("data", "prepare", *paths, "--out", tmp_path / "new", "--vocab-size", 300, "--json")
    result = json.loads(answer.out)
    assert result["documents"] == len(TEXTS)
    store = TokenStore.open(tmp_path / "new")
    assert store.tokenizer().decode(store.document(3).tolist()) == TEXTS[3]


def test_prepare_resumes_with_its_own_tokenizer_and_reports_it(command, tmp_path, monkeypatch):
    paths = write_texts(tmp_path / "texts")
    real = os.fsync
    left = 5

    def fsync(handle):
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    first = command("data", "prepare", *paths, "--out", tmp_path / "new", "--vocab-size", 300)
    assert first.status == 1
    assert "No space left on device" in first.err
    again = command("data", "prepare", *paths, "--out", tmp_path / "new")
    assert again.status == 0
    assert again.err.startswith(f"qkv: {tmp_path / 'new'}: ")
    assert "vocabulary size 300" in again.out


def test_show_prints_inputs_and_targets(command, tmp_path):
    store = small_store(tmp_path)
    answer = command("data", "show", store.folder, "--batch-size", 2, "--seq-len", 7, "--batch", 3, "--seed", 5)
    lines = answer.out.splitlines()
    assert answer.status == 0
    assert [line for line in lines if line.startswith("row")] == ["row 0: 7 targets", "row 1: 7 targets"]
    assert len(lines) == 16
    inputs, targets = zip(*(line.split(" → ") for line in lines if " → " in line), strict=True)
    # The target at a position is the input at the next.
    assert [target.split()[0] for target in targets[:6]] == [line.split()[1] for line in inputs[1:7]]


def test_show_packed_as_json_is_the_batch(command, tmp_path):
    store = small_store(tmp_path)
    options = ["--batch-size", 3, "--seq-len", 50, "--packed", "--verify", "--json"]
    rows = [json.loads(line) for line in command("data", "show", store.folder, *options).out.splitlines()]
    assert len(rows) == 3
    for row in rows:
        assert len(row["ids"]) == len(row["targets"]) == len(row["documents"]) == row["n_targets"] == 50
    assert command("data", "show", store.folder, "--packed").out.count("document ") == 32
    plain = json.loads(command("data", "show", store.folder, "--json").out)
    assert plain["documents"] is None


def test_a_text_shorter_than_a_row_has_ignored_targets(command, tmp_path):
    store = small_store(tmp_path)
    answer = command("data", "show", store.folder, "--seq-len", 5000)
    assert answer.out.count(" → ignored") == 5000 - store.n_tokens


def test_invalid_input_is_reported_in_one_line(command, tmp_path):
    paths = write_texts(tmp_path / "texts")
    (tmp_path / "binary").write_bytes(b"\0\1")
    save_tokenizer(tokenizer(), tmp_path / "tokenizer")
    trained = ["--tokenizer", tmp_path / "tokenizer"]
    new = ["--out", tmp_path / "new"]
    for arguments, parts in [
        (["prepare", *paths, *new, *trained, "--vocab-size", 300], ["--tokenizer", "--vocab-size", "--kind"]),
        (["prepare", *paths, "--out", tmp_path / "texts", *trained], ["texts: ", "a.txt"]),
        (["prepare", *paths, "--out", tmp_path / "texts"], ["--out", "texts: "]),
        (["prepare", tmp_path / "nowhere", *new, *trained], ["nowhere: "]),
        (["prepare", tmp_path / "binary", *new, "--vocab-size", 300], ["binary: ", "byte 0", "NUL"]),
        (["prepare", "-", *new], ["standard input", "--tokenizer"]),
        (["show", tmp_path], [f"{tmp_path}: "]),
    ]:
        assert_only_error(command("data", *arguments), *parts)


@pytest.mark.parametrize("name", ["prepare", "show"])
def test_help_has_an_example(name, command):
    assert f"qkv data {name} " in command("data", name, "--help").out.split("Examples:")[1]
