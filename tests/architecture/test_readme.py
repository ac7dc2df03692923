"""The README: its file tree is complete and its snippets run. Links and options are checked in tests/docs."""

import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from qkv.cli import app
from qkv.cli.help import EXIT_STATUS
from tests.architecture.paths import ROOT, SOURCE
from tests.training.classifiers import reviews, write_tsv

README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def tree_paths() -> list[str]:
    """Return the paths of the tree, in which each level is indented by two spaces."""
    block = re.search(r"## Repository layout\n+```\n(.*?)```", README, re.DOTALL)
    assert block, "README.md has no tree under '## Repository layout'"
    paths, above = [], {}
    for line in block[1].splitlines():
        name = line.split()[0]
        level = (len(line) - len(line.lstrip())) // 2
        above[level] = name if level == 0 else above[level - 1].rstrip("/") + "/" + name
        paths.append(above[level])
    return paths


@pytest.mark.parametrize("path", tree_paths())
def test_every_path_of_the_tree_exists(path):
    assert (ROOT / path).is_dir() if path.endswith("/") else (ROOT / path).is_file()


def test_every_folder_and_module_of_the_package_is_in_the_tree():
    modules = {f"src/qkv/{path.name}" for path in SOURCE.glob("*.py") if path.name != "__init__.py"}
    folders = {f"src/qkv/{path.name}/" for path in SOURCE.iterdir() if any(path.rglob("*.py"))}
    assert modules | folders <= set(tree_paths())


def test_every_folder_and_page_of_the_repository_is_in_the_tree():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not listed:
        pytest.skip("not a git checkout")
    folders = {path.partition("/")[0] + "/" for path in listed if "/" in path and not path.startswith(".")}
    pages = {re.sub(r"(docs/\w+/).*", r"\1", path) for path in listed if path.startswith("docs/")}
    assert folders | pages <= {"src/", *tree_paths()}


def test_every_path_of_the_tree_has_a_description():
    lines = re.search(r"## Repository layout\n+```\n(.*?)```", README, re.DOTALL)[1].splitlines()
    assert [line for line in lines if len(line.split()) < 2] == ["docs/"]


@pytest.mark.parametrize("code", PYTHON, ids=[f"snippet {number}" for number in range(len(PYTHON))])
def test_every_snippet_runs(code, tmp_path):
    command = [sys.executable, "-W", "error", "-c", code]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr


def test_there_is_a_snippet():
    assert PYTHON


def commands(text: str) -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("qkv ")]
    return [shlex.split(line, comments=True)[1:] for line in lines]


COMMANDS = commands(README)
OWN_DATA = commands(README[README.index("## Train on your own data") : README.index("## Lessons")])
QUICK = [words for words in COMMANDS if words not in OWN_DATA and words[0] not in ("train", "explore")]


def test_there_are_commands():
    assert {words[0] for words in COMMANDS} >= {"train", "finetune", "translate", "cost", "lesson"}
    assert {words[0] for words in QUICK} >= {"generate", "translate", "inspect", "cost"}


@pytest.mark.parametrize("words", QUICK, ids=[" ".join(words) for words in QUICK])
def test_every_quick_command_runs(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    app(words, standalone_mode=False)
    assert capsys.readouterr().out


def test_make_demo_installs_the_packages_that_the_commands_require():
    """Figures, the explorer, and BLEU, which is computed during the training of a translator."""
    assert "$(INSTALL) -e '.[plot,serve,eval]'" in (ROOT / "Makefile").read_text()


@pytest.mark.long
def test_the_commands_for_own_data_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("book.txt", "another.txt", "reviews.txt"):
        Path(name).write_text(README.replace("\n## ", "\n<|endoftext|>\n## "))
    write_tsv(Path("train.tsv"), reviews(97))
    write_tsv(Path("dev.tsv"), reviews(31, seed=500))
    numbers = [("uno", "one"), ("dos", "two"), ("tres", "three"), ("cuatro", "four"), ("cinco", "five")]
    pairs = [f"{a} {c} {e}\t{b} {d} {f}\n" for a, b in numbers for c, d in numbers for e, f in numbers]
    Path("pairs.tsv").write_text("".join(pairs))
    for words in OWN_DATA:
        # Three seconds instead of minutes, because the result is not evaluated here.
        short = [word if before != "--minutes" else "0.05" for before, word in pairwise(["", *words])]
        app(short, standalone_mode=False)
        assert capsys.readouterr().out, words


def test_the_exit_statuses_are_those_of_the_help():
    (sentence,) = re.findall(r"[^.|]*\bexit (?:status|code)[^.|]*130[^.|]*\.", " ".join(README.split()), re.IGNORECASE)
    assert re.findall(r"\d+", sentence) == re.findall(r"\d+", EXIT_STATUS)


def test_every_lesson_named_exists():
    from qkv.lessons import LESSONS

    text = README + (ROOT / "Makefile").read_text()
    assert set(re.findall(r"qkv lesson ([a-z0-9-]+)", text)) <= set(LESSONS)
