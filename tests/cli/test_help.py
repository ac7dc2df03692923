"""`qkv` alone, and every `--help`: what a newcomer reads first."""

import os
import re
import shlex
import subprocess
import sys

import pytest
import typer

from qkv.cli import app
from qkv.cli.help import OVERVIEW

ROOT = typer.main.get_command(app)
EXAMPLES = [shlex.split(example)[1:] for group in OVERVIEW.values() for example, _ in group]


def pages(command=ROOT, path=()):
    """Every command that has a page, with the words that lead to it."""
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from pages(inner, (*path, name))


@pytest.fixture
def page(command, monkeypatch):
    def read(*words, columns=80):
        monkeypatch.setenv("COLUMNS", str(columns))
        answer = command(*words)
        assert (answer.status, answer.err) == (0, "")
        return answer.out

    return read


def test_qkv_alone_shows_what_one_can_do(page):
    assert page() == page("--help")
    assert page().startswith("Usage: qkv")


def test_every_command_stands_in_the_overview_once():
    assert sorted(words[0] for words in EXAMPLES) == sorted(ROOT.commands)


@pytest.mark.parametrize("words", EXAMPLES, ids=" ".join)
def test_an_example_of_the_overview_can_be_typed(words):
    command = ROOT.commands[words[0]]
    inner = getattr(command, "commands", {})
    command = inner.get(words[1]) or inner["of"] if inner else command
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize("words", list(pages()), ids=" ".join)
def test_a_page_is_plain(words, page):
    shown = page(*words, "--help")
    assert not re.search(r"<(int|float|str|path|list)|range>|x>=|[{}]", shown)
    assert "\x1b" not in shown
    if words:
        assert "Examples:" in shown
    else:
        assert max(map(len, shown.splitlines())) <= 80
        assert "..." not in shown.split("Options:")[0].partition("\n")[2]


def test_values_are_called_as_people_call_them(page):
    shown = page("look", "--help")
    assert re.search(r"-n, --n N +lens.*\[default: 5\]", shown, re.DOTALL)
    assert "Usage: qkv look [OPTIONS] MODEL [TEXTS]..." in shown
    assert "[at least 0.05]" in page("train", "--help", columns=120)


def test_cost_is_asked_without_a_further_word(page):
    assert page("cost") == page("cost", "--help")
    assert page("cost").startswith("Usage: qkv cost [OPTIONS] MODEL\n       qkv cost plan")


def test_the_exit_statuses_are_told_in_one_place(page):
    assert "0 done, 1 failed (disk, network, a check), 2 bad input" in page()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("qkv ge", {"generate"}), ("qkv look s", {"sentiment", "stories"}), ("qkv look stories --vi", {"--view"})],
)
def test_the_shell_completes_commands_models_and_options(typed, offered):
    environment = {**os.environ, "_QKV_COMPLETE": "complete_bash", "COMP_WORDS": typed}
    environment["COMP_CWORD"] = str(len(typed.split()) - 1)
    command = [sys.executable, "-c", "from qkv.cli import main; main()"]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert set(answer.stdout.split()) == offered
