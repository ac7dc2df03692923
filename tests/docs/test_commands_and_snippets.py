"""Commands and Python snippets in the documentation: commands and options exist, and snippets run."""

import re
import shlex

import pytest
import typer

from benchmarks.__main__ import BENCHMARKS
from qkv.cli import app
from qkv.cli.cost import DEFAULT_COMMAND
from tests.docs.pages import PAGES

COMMAND_LINES = sorted(
    {
        (page.name, line.removeprefix("$ ").strip())
        for page in PAGES
        for line in (
            *(line for block in page.blocks("sh") for line in block.splitlines()),
            *re.findall(r"\| `(qkv [^`]+)` \|", page.text),
        )
        if line.removeprefix("$ ").startswith("qkv ")
    }
)
SNIPPETS = [
    pytest.param(block, id=f"{page.name} {number}")
    for page in PAGES
    if page.name.startswith("docs/")
    for number, block in enumerate(page.blocks("python"))
]


def pop_command(words):
    """Remove the names of the command and its subcommand from the words, and return the command."""
    command = typer.main.get_command(app)
    while subcommands := getattr(command, "commands", {}):
        if words[0] in subcommands:
            command = subcommands[words.pop(0)]
        elif DEFAULT_COMMAND in subcommands:  # `qkv cost MODEL` runs `qkv cost estimate MODEL`
            command = subcommands[DEFAULT_COMMAND]
        else:
            raise KeyError(words[0])
    return command


@pytest.mark.parametrize(("page", "line"), COMMAND_LINES, ids=[f"{page}: {line}" for page, line in COMMAND_LINES])
def test_every_documented_command_exists_and_accepts_its_options(page, line):
    words = shlex.split(re.split(r" [<>|] ", line)[0], comments=True)[1:]
    if not words or words[0].startswith("-"):
        return
    command = pop_command(words)
    accepted = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    options = {word.partition("=")[0] for word in words if re.fullmatch(r"--?[a-z][\w-]*(=.*)?", word)}
    assert options <= {*accepted, "--help", "-h"}, f"{page}: {options - accepted}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_documented_benchmark_exists(page):
    assert set(re.findall(r"python -m benchmarks ([a-z][\w-]*)", page.text)) <= set(BENCHMARKS)


def test_the_documentation_contains_many_commands():
    assert len(COMMAND_LINES) > 40


@pytest.mark.parametrize("code", SNIPPETS)
def test_every_python_snippet_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("The cat sat on the mat. " * 200)
    exec(compile(code, "snippet", "exec"), {"__name__": "__main__"})
