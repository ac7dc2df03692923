"""`qkv` without arguments, and all `--help` pages."""

import os
import re
import shlex
import subprocess
import sys

import pytest
import typer

from qkv.cli import app
from qkv.cli.cost import DEFAULT_COMMAND
from qkv.cli.help import EXIT_STATUS, OVERVIEW

ROOT = typer.main.get_command(app)
EXAMPLES = [shlex.split(example)[1:] for group in OVERVIEW.values() for example, _ in group]


def pages(command=ROOT, path=()):
    """Yield the path of every command, such as ("data", "show")."""
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


def test_qkv_without_arguments_prints_the_help(page):
    assert page() == page("--help")
    assert page().startswith("Usage: qkv")


def test_every_command_is_in_the_overview_once():
    assert sorted(words[0] for words in EXAMPLES) == sorted(ROOT.commands)


@pytest.mark.parametrize("words", EXAMPLES, ids=" ".join)
def test_the_examples_of_the_overview_use_existing_options(words):
    command = ROOT.commands[words[0]]
    inner = getattr(command, "commands", {})
    command = inner.get(words[1]) or inner[DEFAULT_COMMAND] if inner else command
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options


@pytest.mark.parametrize("words", list(pages()), ids=" ".join)
def test_a_help_page_has_plain_names_for_values(words, page):
    output = page(*words, "--help")
    assert not re.search(r"<(int|float|str|path|list)|range>|x>=|[{}]", output)
    assert "\x1b" not in output
    if words:
        assert "Examples:" in output
    else:
        assert max(map(len, output.splitlines())) <= 80
        assert "..." not in output.split("Options:")[0].partition("\n")[2]


def test_values_have_conventional_names(page):
    output = page("inspect", "--help")
    assert re.search(r"-n, --top-k N +.*\[default: 5\]", output, re.DOTALL)
    assert "Usage: qkv inspect [OPTIONS] MODEL [TEXTS]..." in output
    assert "[at least 0.05]" in page("train", "--help", columns=120)


def test_cost_has_a_default_subcommand(page):
    assert page("cost") == page("cost", "--help")
    assert page("cost").startswith("Usage: qkv cost [OPTIONS] MODEL\n       qkv cost plan")


def test_the_overview_lists_the_exit_statuses(page):
    assert EXIT_STATUS in " ".join(page().split())


@pytest.mark.parametrize(
    ("typed", "completions"),
    [("qkv ge", {"generate"}), ("qkv inspect s", {"sentiment", "stories"}), ("qkv inspect stories --vi", {"--view"})],
)
def test_the_shell_completes_commands_models_and_options(typed, completions):
    environment = {**os.environ, "_QKV_COMPLETE": "complete_bash", "COMP_WORDS": typed}
    environment["COMP_CWORD"] = str(len(typed.split()) - 1)
    command = [sys.executable, "-c", "from qkv.cli import main; main()"]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert set(answer.stdout.split()) == completions
