"""`qkv tokenizer train` and `qkv tokenizer show`."""

import json

import pytest

from qkv.choices import TokenizerKind
from qkv.text import load_tokenizer, save_tokenizer
from tests.cli.answers import assert_only_error
from tests.text.samples import TEXTS, trained


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(TEXTS))
    return tmp_path / "text.txt"


@pytest.fixture
def folder(tmp_path):
    save_tokenizer(trained(TokenizerKind.BPE, None, 257), tmp_path / "trained")
    return tmp_path / "trained"


@pytest.mark.parametrize("kind", list(TokenizerKind))
def test_train_saves_a_tokenizer(kind, command, text, tmp_path):
    answer = command("tokenizer", "train", text, "--out", tmp_path / "new", "--kind", kind, "--vocab-size", 300)
    assert answer.status == 0
    tokenizer = load_tokenizer(tmp_path / "new")
    assert answer.out.startswith(f"{tmp_path / 'new'}: {kind} tokenizer, {tokenizer.vocab_size} tokens")
    assert len(answer.out.splitlines()) == 1


def test_train_with_another_set_of_special_tokens_as_json(command, text, tmp_path):
    options = ["--vocab-size", 300, "--special-tokens", "seq2seq", "--lowercase", "--json"]
    answer = command("tokenizer", "train", text, "--out", tmp_path / "new", *options)
    result = json.loads(answer.out)
    assert result["vocab_size"] == 300
    assert result["special_tokens"]["eos_token"] == "<eos>"
    tokenizer = load_tokenizer(tmp_path / "new")
    assert tokenizer.encode("THE") == tokenizer.encode("the")


def test_a_smaller_vocabulary_than_requested_is_reported(command, text, tmp_path):
    answer = command("tokenizer", "train", text, "--out", tmp_path / "new", "--kind", "char", "--vocab-size", 5000)
    assert "5000" in answer.err
    assert "5000" not in answer.out.removeprefix(str(tmp_path))


def test_show_prints_one_line_per_text_with_ids_and_bytes(command, folder):
    answer = command("tokenizer", "show", folder, "añ", "x\ny")
    assert answer.status == 0
    lines = answer.out.splitlines()
    assert lines[0].split("  ")[1:] == [f"<c3> {lines[0].split()[3]}", f"<b1> {lines[0].split()[5]}"]
    assert lines[0].startswith('"a" ')
    assert lines[0].endswith("@2:3")
    assert '"\\n"' in lines[1]
    assert len(lines) == 2


def test_show_reads_lines_from_standard_input(command, folder):
    lines = command("tokenizer", "show", folder, "--json", stdin="one\n\ntwo").out.splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["one", "", "two"]
    assert [token["end"] for token in json.loads(lines[0])["tokens"]] == [1, 2, 3]


def test_show_accepts_the_name_of_a_shipped_model(command):
    assert command("tokenizer", "show", "bert", "the cat").out.split('"')[1::2] == ["the", "cat"]


def test_special_tokens_are_parsed_only_on_request(command, folder):
    plain = command("tokenizer", "show", folder, "<|endoftext|>").out
    parsed = command("tokenizer", "show", folder, "<|endoftext|>", "--parse-special-tokens").out
    assert plain.count("@") == 13
    assert parsed == '"<|endoftext|>" 0@0:13\n'


def test_invalid_input_is_reported_in_one_line(command, text, folder, tmp_path):
    for arguments, parts in [
        (["train", text, "--out", folder], [f"--out {folder}: ", "tokenizer"]),
        (["train", text, "--out", text], [f"--out {text}: "]),
        (["train", text, "--out", tmp_path / "new", "--vocab-size", 3], ["vocab_size=3"]),
        (["train", tmp_path / "no.txt", "--out", tmp_path / "new"], ["no.txt: "]),
        (["show", tmp_path / "no.json", "x"], ["no.json: "]),
    ]:
        assert_only_error(command("tokenizer", *arguments), *parts)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["train", "show"])
def test_help_has_an_example(name, command):
    assert f"qkv tokenizer {name} " in command("tokenizer", name, "--help").out.split("Examples:")[1]
