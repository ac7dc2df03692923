"""Exact output of the command line: all help pages, representative results and error messages.

The expected texts are in tests/cli/snapshots. To update them after a change of the output, run
`QKV_UPDATE_SNAPSHOTS=1 pytest tests/cli/test_snapshots.py` and review the difference.
"""

import os
import re
from pathlib import Path

import pytest
import typer

from qkv.cli import app
from qkv.cli.cost import DEFAULT_COMMAND

SNAPSHOTS = Path(__file__).parent / "snapshots"
UPDATE = bool(os.environ.get("QKV_UPDATE_SNAPSHOTS"))
WIDTH = 80

# Only results that do not depend on the machine. Model outputs are limited to tokens and rounded numbers.
RESULTS = {
    "generate": ["generate", "stories", "Once upon a time", "-n", "20", "--temperature", "0"],
    "generate-steps": ["generate", "stories", "The cat", "-n", "2", "--temperature", "0", "--top-k=3", "--show-steps"],
    "translate": ["translate", "es-en", "La casa blanca está cerca del río.", "--alignment"],
    "fill": ["fill", "bert", "She opened the [MASK] and went outside.", "A cat.", "-n", "1"],
    "tokenizer-show": ["tokenizer", "show", "bert", "unbelievable", "The cat sat."],
    "inspect-map": ["inspect", "stories", "The dog ran.", "--view", "map", "--layer", "1", "--head", "2"],
    "inspect-effect": ["inspect", "stories", "The dog ran to the", "--view", "effect", "--ablate-head", "1.2", "-n3"],
    "inspect-coreference": [
        "inspect", "bert", "The dog saw the cat as it ran.", "--view", "coreference", "--candidates", "dog,cat",
    ],
    "cost": ["cost", "gpt2", "--mode", "train", "--batch-size", "8", "--device", "h200"],
    "cost-does-not-fit": ["cost", "gpt2-xl", "--mode", "train", "--batch-size", "64", "--device", "l4"],
    "cost-lecture": ["cost", "gpt2", "--lecture"],
    "cost-plan": ["cost", "plan", "--params", "124M", "--tokens", "2.5B", "--device", "h200", "--price", "3.5"],
    "cost-plan-does-not-fit": ["cost", "plan", "--params", "70B", "--tokens", "1e9", "--device", "h200"],
    "models": ["models"],
    "lesson": ["lesson"],
}  # fmt: skip
ERRORS = [
    ["generate", "stories", "x", "--temperature", "-1"],
    ["generate", "stories", "x", "--beam", "2", "--top-k", "3"],
    ["generate", "stories", "x", "--beam", "2", "--n-best", "3"],
    ["generate", "stories", "x", "--stream", "--json"],
    ["generate", "stories", "x", "--device", "tpu"],
    ["generate", "storys", "x"],
    ["generate", "bert", "x"],
    ["translate", "es-en", "uno", "--layer", "1"],
    ["translate", "es-en", "uno", "dos", "--plot", "a.png"],
    ["fill", "stories", "[MASK]"],
    ["classify", "bert", "x"],
    ["classify", "sentiment", "a\tb\tc"],
    ["embed", "bert", "x", "--out", "x.txt"],
    ["similar", "bert", "x", "--among", "missing.txt"],
    ["words", "bert", "king"],
    ["inspect", "stories", "The dog", "--view", "effect"],
    ["inspect", "stories", "The dog", "--ablate-head", "1"],
    ["inspect", "stories", "The dog", "--mask-edge", "9:1"],
    ["inspect", "stories", "The dog", "--view", "map", "--layer", "99"],
    ["evaluate", "stories"],
    ["evaluate", "stories", "--text", "missing.txt"],
    ["evaluate", "stories", "--text", "x", "--against", "bert"],
    ["train"],
    ["train", "gpt"],
    ["train", "gpt2"],
    ["train", "gpt", "--text", "missing.txt"],
    ["train", "gpt", "--text", "a", "--rnn"],
    ["train", "--resume", "missing"],
    ["train", "--resume", "run", "--steps", "3"],
    ["train", "missing.toml"],
    ["finetune"],
    ["finetune", "bert", "--data", "missing.tsv"],
    ["finetune", "bert", "--data", "a.tsv", "--freeze", "x"],
    ["tokenizer", "show", "missing.json", "x"],
    ["data", "show", "missing"],
    ["convert", "stories", "out", "--to", "int8", "--dtype", "f16"],
    ["models", "missing"],
    ["cost", "gpt3x"],
    ["cost", "gpt2", "--seq-len", "2000"],
    ["cost", "gpt2", "--device", "h2000"],
    ["cost", "gpt2", "--batch-size", "1.5"],
    ["cost", "plan", "--params", "1B"],
    ["lesson", "missing"],
]


def command_paths(command=None, path=()):
    """Yield the path of every command, such as ("data", "show"), without the hidden default of `qkv cost`."""
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        if name != DEFAULT_COMMAND:
            yield from command_paths(inner, (*path, name))


COMMANDS = list(command_paths(typer.main.get_command(app)))


@pytest.fixture
def check_snapshot(monkeypatch, tmp_path):
    """A function that compares a text with a stored one, or stores it if QKV_UPDATE_SNAPSHOTS is set."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # no calibration of this machine
    monkeypatch.chdir(tmp_path)

    def check(name, text):
        path = SNAPSHOTS / f"{name}.txt"
        if UPDATE:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), "run with QKV_UPDATE_SNAPSHOTS=1 to update the snapshot"

    return check


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words) or "qkv")
def test_help(words, command, check_snapshot):
    answer = command(*words, "--help")
    assert (answer.status, answer.err) == (0, "")
    check_snapshot("-".join(["help", *words]), answer.out)


@pytest.mark.parametrize("name", RESULTS)
def test_result(name, command, check_snapshot):
    answer = command(*RESULTS[name])
    assert answer.status == 0
    check_snapshot(name, answer.out + answer.err)


def test_errors(command, check_snapshot):
    """One line of standard error for each command line, in one file."""
    lines = []
    for arguments in ERRORS:
        answer = command(*arguments, stdin="")
        assert (answer.status, answer.out) == (2, ""), arguments
        (error,) = answer.err.splitlines()
        lines += [f"$ qkv {' '.join(map(repr_argument, arguments))}", error, ""]
    check_snapshot("errors", "\n".join(lines))


def repr_argument(argument):
    return argument if re.fullmatch(r"[\w./=:,-]+", argument) else repr(argument)


def test_there_is_no_unused_snapshot():
    used = {"errors", *RESULTS, *("-".join(["help", *words]) for words in COMMANDS)}
    assert {path.stem for path in SNAPSHOTS.iterdir()} == used
