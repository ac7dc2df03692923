"""`qkv tokenizer`: results on standard output, one line a text; mistakes in a line and status 2."""

import json

import pytest

from qkv.choices import TokenizerKind
from qkv.text import load_tokenizer, save_tokenizer
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
def test_train_writes_a_tokenizer_that_loads(kind, command, text, tmp_path):
    answer = command("tokenizer", "train", text, "--out", tmp_path / "new", "--kind", kind, "--size", 300)
    assert answer.status == 0
    tokenizer = load_tokenizer(tmp_path / "new")
    assert answer.out.startswith(f"{tmp_path / 'new'}: {kind} of {tokenizer.vocab_size} ids")
    assert len(answer.out.splitlines()) == 1


def test_train_as_json_with_other_specials(command, text, tmp_path):
    options = ["--size", 300, "--specials", "seq2seq", "--lowercase", "--json"]
    answer = command("tokenizer", "train", text, "--out", tmp_path / "new", *options)
    result = json.loads(answer.out)
    assert result["vocab_size"] == 300
    assert result["specials"]["eos_token"] == "<eos>"
    tokenizer = load_tokenizer(tmp_path / "new")
    assert tokenizer.encode("THE") == tokenizer.encode("the")


def test_fewer_ids_than_asked_are_said_beside_the_result(command, text, tmp_path):
    answer = command("tokenizer", "train", text, "--out", tmp_path / "new", "--kind", "char", "--size", 5000)
    assert "fewer than the 5000 asked" in answer.err
    assert "asked" not in answer.out.removeprefix(str(tmp_path))


def test_show_prints_one_line_a_text_with_ids_and_bytes(command, folder):
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
    assert [piece["end"] for piece in json.loads(lines[0])["pieces"]] == [1, 2, 3]


def test_a_shipped_models_tokenizer_is_shown_by_name(command):
    assert command("tokenizer", "show", "bert", "the cat").out.split('"')[1::2] == ["the", "cat"]


def test_specials_are_text_unless_asked(command, folder):
    plain = command("tokenizer", "show", folder, "<|endoftext|>").out
    asked = command("tokenizer", "show", folder, "<|endoftext|>", "--parse-specials").out
    assert plain.count("@") == 13
    assert asked == '"<|endoftext|>" 0@0:13\n'


def test_mistakes_are_one_line_and_status_2(command, text, folder, tmp_path):
    for arguments, line in [
        (["train", text, "--out", folder], f"--out {folder}: is not empty (it holds tokenizer"),
        (["train", text, "--out", text], f"--out {text}: is a file, not a folder"),
        (["train", text, "--out", tmp_path / "new", "--size", 3], "vocab_size=3 is too small"),
        (["train", tmp_path / "no.txt", "--out", tmp_path / "new"], "no.txt: there is no such file or folder"),
        (["show", tmp_path / "no.json", "x"], "no.json: cannot be read: No such file"),
    ]:
        answer = command("tokenizer", *arguments)
        assert answer.status == 2
        assert answer.out == ""
        assert answer.err.startswith("qkv: error: ")
        assert line in answer.err
        assert len(answer.err.splitlines()) == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("verb", ["train", "show"])
def test_help_has_an_example(verb, command):
    assert f"qkv tokenizer {verb} " in command("tokenizer", verb, "--help").out.split("Examples:")[1]
