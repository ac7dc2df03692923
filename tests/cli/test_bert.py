"""`qkv train bert` and `qkv data show` of its examples."""

import json
import re
import tomllib

import pytest

from qkv.data.sentence_store import SentenceStore
from tests.training.test_bert import write_texts


@pytest.fixture
def command(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QKV_DATA", raising=False)
    return command


def test_own_text_becomes_a_bert_that_others_can_load(command, tmp_path):
    write_texts(tmp_path / "text.txt", 60)
    answer = command("train", "bert", "--text", "text.txt", "--steps", 2, "--out", "run", "--device", "cpu")
    assert answer.status == 0
    assert "tokens of 57 documents to train on" in answer.err
    assert re.search(r"step 2: validation loss .*masked word accuracy .*next sentence accuracy", answer.err)
    assert 'try it: qkv fill run "A day in the [MASK]."' in answer.err
    recipe = tomllib.loads((tmp_path / "run" / "recipe.toml").read_text())
    assert recipe["tokenizer"]["lowercase"] is True
    assert recipe["masking"]["next_sentence"] is True
    assert command("convert", "run", "hf", "--to", "hf").status == 0
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    shown = command("data", "show", "run", "--rows", 2, "--length", 23)
    assert shown.out.count("B follows A in document ") == shown.out.count("B does not follow A: A is of document ") == 1
    assert command("train", "--resume", "run", "--device", "cpu").status == 0


def test_one_document_is_refused_and_can_be_trained_on_all_the_same(command, tmp_path):
    (tmp_path / "text.txt").write_text("The cat sat. The dog ran. " * 50)
    refused = command("train", "bert", "--text", "text.txt", "--steps", 1, "--out", "run", "--device", "cpu")
    assert refused.status == 2
    assert "another document, and there is 1: give several files" in refused.err
    assert "or leave them out: --no-next-sentence, in a recipe" in refused.err
    assert not (tmp_path / "run").exists()
    options = ["--no-next-sentence", "--steps", 1, "--out", "run", "--device", "cpu"]
    assert command("train", "bert", "--text", "text.txt", *options).status == 0
    assert command("data", "show", "run", "--length", 17).out.startswith("row 0: document 0; ")


def test_a_pair_is_shown_with_what_was_hidden_and_how(command, tmp_path):
    write_texts(tmp_path / "text.txt", 60)
    made = command("data", "prepare", "text.txt", "--out", "store", "--sentences", "--size", 71)
    assert made.status == 0
    assert "60 documents" in made.out
    lines = command("data", "show", "store", "--rows", 40, "--length", 40).out.splitlines()
    # The tokenizer's ties fall by chance, so no line can be foretold.
    assert sum(line.startswith("row") for line in lines) == 40
    assert sum(bool(re.search(r"\d  [AB]  \[MASK\] +← \S+, hidden$", line)) for line in lines) > 100
    assert sum(line.endswith("← asked for, but left as it is") for line in lines) > 10
    assert sum(line.endswith(", replaced by any word") for line in lines) > 10
    asked = [int(re.search(r"; (\d+) of", line)[1]) for line in lines if line.startswith("row")]
    assert sum("←" in line for line in lines) == sum(asked)


def test_pairs_as_json_are_those_of_the_store(command, tmp_path):
    write_texts(tmp_path / "text.txt", 60)
    command("data", "prepare", "text.txt", "--out", "store", "--sentences", "--size", 71)
    store = SentenceStore.open(tmp_path / "store")
    rows = [json.loads(line) for line in command("data", "show", "store", "--rows", 6, "--json").out.splitlines()]
    assert sum(row["is_wrong"] for row in rows) == 3
    for row in rows:
        assert (row["documents"][0] != row["documents"][1]) == row["is_wrong"]
        first, end = store.store.tokenizer().special_ids, row["segments"].index(1) - 1
        assert row["ids"][end] in first
        assert all(row["segments"][int(place)] in (0, 1) for place in row["asked"])
