"""Every topic of the lectures has a row in docs/mission.md with a command, a notebook and a test."""

import re

from qkv.lessons import LESSONS
from tests.docs.pages import ROOT, Page

IDS = [
    *("1.1", "1.2", "1.3", "1.4", "1.5", "1.6a", "1.6b", "1.7", "1.8", "1.9", "1.10", "1.11"),
    *(f"2.{n}" for n in range(1, 6)),
    *(f"3.{n}" for n in range(1, 8)),
    *(f"4.{n}" for n in range(1, 6)),
    *(f"5.{n}" for n in range(1, 5)),
    *(f"6.{n}" for n in range(1, 6)),
    *(f"7.{n}" for n in range(1, 3)),
    *(f"8.{n}" for n in range(1, 6)),
    *(f"9.{n}" for n in range(1, 8)),
    "10.1",
]
PAGE = Page(ROOT / "docs/mission.md")
ROWS = {
    cells[0]: cells[1:]
    for line in PAGE.text.splitlines()
    if re.match(r"\| \d", line) and (cells := [cell.strip() for cell in line.strip("|").split("|")])
}


def test_every_topic_has_exactly_one_row():
    assert list(ROWS) == IDS
    assert len(re.findall(r"^\| \d", PAGE.text, re.MULTILINE)) == len(IDS)


def test_every_row_has_a_command_a_notebook_and_a_test():
    for name, (_, command, notebook, _, test) in ROWS.items():
        assert re.match(r"`(qkv|python) ", command), name
        assert "notebooks/" in notebook, name
        assert "tests/" in test, name


def test_every_lesson_of_a_row_is_in_the_catalog():
    for name, (_, command, *_) in ROWS.items():
        if lesson := re.match(r"`qkv lesson ([\w-]+)`", command):
            assert lesson[1] in LESSONS, f"{name}: unknown lesson {lesson[1]}"


def test_every_lesson_and_notebook_is_mentioned():
    assert {lesson for lesson in LESSONS if f"{lesson}`" not in PAGE.text} <= {"generate", "word-vectors"}
    notebooks = set(re.findall(r"notebooks/([\w-]+)\.ipynb", PAGE.text))
    assert notebooks == {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
