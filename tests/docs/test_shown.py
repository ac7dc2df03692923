"""What the pages show can be typed: every command and option exists, every Python snippet runs."""

import re
import shlex

import pytest
import typer

from benchmarks.__main__ import BENCHMARKS
from qkv.cli import app
from tests.docs.pages import PAGES

SHOWN = sorted(
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


def command_of(words):
    command = typer.main.get_command(app)
    while inner := getattr(command, "commands", {}):
        if words[0] in inner:
            command = inner[words.pop(0)]
        elif "of" in inner:  # `qkv cost MODEL`: the word may be left out
            command = inner["of"]
        else:
            raise KeyError(words[0])
    return command


@pytest.mark.parametrize(("page", "line"), SHOWN, ids=[f"{page}: {line}" for page, line in SHOWN])
def test_every_command_that_is_shown_exists_with_its_options(page, line):
    words = shlex.split(re.split(r" [<>|] ", line)[0], comments=True)[1:]
    if not words or words[0].startswith("-"):
        return
    command = command_of(words)
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    given = {word.partition("=")[0] for word in words if re.fullmatch(r"--?[a-z][\w-]*(=.*)?", word)}
    assert given <= {*known, "--help", "-h"}, f"{page}: {given - known}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_benchmark_that_is_named_exists(page):
    assert set(re.findall(r"python -m benchmarks ([a-z][\w-]*)", page.text)) <= set(BENCHMARKS)


def test_many_commands_were_found():
    assert len(SHOWN) > 40


@pytest.mark.parametrize("code", SNIPPETS)
def test_every_snippet_of_a_page_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("The cat sat on the mat. " * 200)
    exec(compile(code, "snippet", "exec"), {"__name__": "__main__"})
