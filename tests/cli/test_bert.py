"""`qkv train bert`, and `qkv data show` of masked examples."""

import json
import re
import tomllib

import pytest

from qkv.data.sentence_store import SentenceStore
from tests.cli.answers import assert_error
from tests.training.test_bert import write_texts


@pytest.fixture
def command(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QKV_DATA", raising=False)
    return command


def test_a_bert_is_trained_on_a_text_and_exported(command, tmp_path):
    write_texts(tmp_path / "text.txt", 60)
    answer = command("train", "bert", "--text", "text.txt", "--steps", 2, "--out", "run", "--device", "cpu")
    assert answer.status == 0
    assert "57 documents" in answer.err
    assert re.search(r"step 2: validation loss .*masked \w+ accuracy .*next sentence accuracy", answer.err)
    assert 'qkv fill run "A day in the [MASK]."' in answer.err
    recipe = tomllib.loads((tmp_path / "run" / "recipe.toml").read_text())
    assert recipe["tokenizer"]["lowercase"] is True
    assert recipe["masking"]["next_sentence"] is True
    assert command("convert", "run", "hf", "--to", "hf").status == 0
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    rows = command("data", "show", "run", "--batch-size", 2, "--seq-len", 23, "--json").out.splitlines()
    assert sorted(json.loads(row)["is_random_next"] for row in rows) == [False, True]
    assert command("train", "--resume", "run", "--device", "cpu").status == 0


def test_one_document_requires_no_next_sentence(command, tmp_path):
    (tmp_path / "text.txt").write_text("The cat sat. The dog ran. " * 50)
    refused = command("train", "bert", "--text", "text.txt", "--steps", 1, "--out", "run", "--device", "cpu")
    assert_error(refused, "1", "--no-next-sentence")
    assert not (tmp_path / "run").exists()
    options = ["--no-next-sentence", "--steps", 1, "--out", "run", "--device", "cpu"]
    assert command("train", "bert", "--text", "text.txt", *options).status == 0
    assert command("data", "show", "run", "--seq-len", 17).out.startswith("row 0: document 0; ")


def test_pairs_are_printed_with_their_masked_tokens(command, tmp_path):
    write_texts(tmp_path / "text.txt", 60)
    answer = command("data", "prepare", "text.txt", "--out", "store", "--sentences", "--vocab-size", 71)
    assert answer.status == 0
    assert "60 documents" in answer.out
    lines = command("data", "show", "store", "--batch-size", 40, "--seq-len", 40).out.splitlines()
    # Ties in the training of the tokenizer are broken at random, so the lines are not predictable.
    assert sum(line.startswith("row") for line in lines) == 40
    assert sum(bool(re.search(r"\d  [AB]  \[MASK\] +← \S+, masked$", line)) for line in lines) > 100
    assert sum(line.endswith("← unchanged") for line in lines) > 10
    assert sum(line.endswith(", replaced by a random token") for line in lines) > 10
    n_targets = [int(re.search(r"; (\d+) of", line)[1]) for line in lines if line.startswith("row")]
    assert sum("←" in line for line in lines) == sum(n_targets)


def test_json_pairs_are_those_of_the_store(command, tmp_path):
    write_texts(tmp_path / "text.txt", 60)
    command("data", "prepare", "text.txt", "--out", "store", "--sentences", "--vocab-size", 71)
    store = SentenceStore.open(tmp_path / "store")
    rows = [json.loads(line) for line in command("data", "show", "store", "--batch-size", 6, "--json").out.splitlines()]
    assert sum(row["is_random_next"] for row in rows) == 3
    for row in rows:
        assert (row["documents"][0] != row["documents"][1]) == row["is_random_next"]
        special_ids, end = store.store.tokenizer().special_ids, row["segments"].index(1) - 1
        assert row["ids"][end] in special_ids
        assert all(row["segments"][int(position)] in (0, 1) for position in row["targets"])
