"""Every row of the lectures stands in docs/mission.md, with something that shows it."""

import re

from qkv.lessons import LESSONS
from tests.docs.pages import ROOT, Page

IDS = (
    "1.1 1.2 1.3 1.4 1.5 1.6a 1.6b 1.7 1.8 1.9 1.10 1.11 2.1 2.2 2.3 2.4 2.5 3.1 3.2 3.3 3.4 3.5 3.6 3.7 4.1 4.2 4.3 4.4 "
    "4.5 5.1 5.2 5.3 5.4 6.1 6.2 6.3 6.4 6.5 7.1 7.2 8.1 8.2 8.3 8.4 8.5 9.1 9.2 9.3 9.4 9.5 9.6 9.7 10.1"
).split()
NOT_BUILT = {"8.5"}
PAGE = Page(ROOT / "docs/mission.md")
ROWS = {
    cells[0]: cells[1:]
    for line in PAGE.text.splitlines()
    if re.match(r"\| \d", line) and (cells := [cell.strip() for cell in line.strip("|").split("|")])
}


def test_no_row_is_missing_and_none_stands_twice():
    assert list(ROWS) == IDS
    assert len(re.findall(r"^\| \d", PAGE.text, re.MULTILINE)) == len(IDS)


def test_every_row_has_a_command_a_notebook_and_a_test():
    for name, (_, command, notebook, _, test) in ROWS.items():
        if name in NOT_BUILT:
            assert "not built" in command
            continue
        assert re.match(r"`(qkv|python) ", command), name
        assert "notebooks/" in notebook, name
        assert "tests/" in test, name


def test_every_lesson_of_a_row_is_in_the_catalogue():
    for name, (_, command, *_) in ROWS.items():
        if found := re.match(r"`qkv lesson ([\w-]+)`", command):
            assert found[1] in LESSONS, f"{name}: there is no lesson {found[1]}"


def test_every_lesson_and_notebook_is_named():
    assert {lesson for lesson in LESSONS if f"{lesson}`" not in PAGE.text} <= {"generate", "word-vectors"}
    named = set(re.findall(r"notebooks/([\w-]+)\.ipynb", PAGE.text))
    assert named == {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
