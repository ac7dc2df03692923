"""`qkv data`: a store from texts, batches token by token; mistakes in a line."""

import errno
import json
import os

import pytest

from qkv.data import TokenStore
from qkv.text import save_tokenizer
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
        "277 vocabulary size, 1 shards\n"
    )
    assert "tokens a second" in answer.err


def test_prepare_trains_a_tokenizer_where_none_is_named(command, tmp_path):
    paths = write_texts(tmp_path / "texts")
    answer = command("data", "prepare", *paths, "--out", tmp_path / "new", "--size", 300, "--json")
    result = json.loads(answer.out)
    assert result["documents"] == len(TEXTS)
    store = TokenStore.open(tmp_path / "new")
    assert store.tokenizer().decode(store.document(3).tolist()) == TEXTS[3]


def test_prepare_goes_on_with_its_own_tokenizer_and_says_so(command, tmp_path, monkeypatch):
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
    first = command("data", "prepare", *paths, "--out", tmp_path / "new", "--size", 300)
    assert first.status == 1
    assert "No space left on device" in first.err
    again = command("data", "prepare", *paths, "--out", tmp_path / "new")
    assert again.status == 0
    assert "going on with an unfinished store" in again.err
    assert "300 vocabulary size" in again.out


def test_show_prints_inputs_and_targets(command, tmp_path):
    store = small_store(tmp_path)
    answer = command("data", "show", store.folder, "--rows", 2, "--length", 7, "--batch", 3, "--seed", 5)
    lines = answer.out.splitlines()
    assert answer.status == 0
    assert [line for line in lines if line.startswith("row")] == ["row 0: 7 targets", "row 1: 7 targets"]
    assert len(lines) == 16
    given, wanted = zip(*(line.split(" → ") for line in lines if " → " in line), strict=True)
    # What is wanted at a place is given at the next.
    assert [w.split()[0] for w in wanted[:6]] == [g.split()[1] for g in given[1:7]]


def test_show_packed_as_json_is_the_batch(command, tmp_path):
    store = small_store(tmp_path)
    options = ["--rows", 3, "--length", 50, "--packed", "--verify", "--json"]
    rows = [json.loads(line) for line in command("data", "show", store.folder, *options).out.splitlines()]
    assert len(rows) == 3
    for row in rows:
        assert len(row["ids"]) == len(row["targets"]) == len(row["documents"]) == row["n_targets"] == 50
    assert command("data", "show", store.folder, "--packed").out.count("document ") == 32
    plain = json.loads(command("data", "show", store.folder, "--json").out)
    assert plain["documents"] is None


def test_a_text_shorter_than_a_row_has_places_without_a_target(command, tmp_path):
    store = small_store(tmp_path)
    answer = command("data", "show", store.folder, "--length", 5000)
    assert answer.out.count(" → nothing") == 5000 - store.n_tokens


def test_mistakes_are_one_line_and_status_2(command, tmp_path):
    paths = write_texts(tmp_path / "texts")
    (tmp_path / "binary").write_bytes(b"\0\1")
    save_tokenizer(tokenizer(), tmp_path / "tokenizer")
    known = ["--tokenizer", tmp_path / "tokenizer"]
    new = ["--out", tmp_path / "new"]
    for arguments, line in [
        (["prepare", *paths, *new, *known, "--size", 300], "leave out --size and --kind"),
        (["prepare", *paths, "--out", tmp_path / "texts", *known], "is not empty (it holds a.txt)"),
        (["prepare", *paths, "--out", tmp_path / "texts"], "is not empty (it holds "),
        (["prepare", tmp_path / "nowhere", *new, *known], "nowhere: there is no such file or folder"),
        (["prepare", tmp_path / "binary", *new, "--size", 300], "byte 0 is NUL"),
        (["prepare", "-", *new], "standard input can be read only once"),
        (["show", tmp_path], "holds no token store"),
    ]:
        answer = command("data", *arguments)
        assert answer.status == 2
        assert answer.out == ""
        assert answer.err.startswith("qkv: error: ")
        assert line in answer.err
        assert len(answer.err.splitlines()) == 1


@pytest.mark.parametrize("verb", ["prepare", "show"])
def test_help_has_an_example(verb, command):
    assert f"qkv data {verb} " in command("data", verb, "--help").out.split("Examples:")[1]
