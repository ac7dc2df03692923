"""Files and functions stay short enough to read in one go."""

import ast
import re

import pytest

from tests.architecture.places import MODULES, SOURCE, relative

MAX_FILE_LINES = 400  # the aim is 300
MAX_FUNCTION_LINES = 60  # the aim is 40
MAX_LESSON_LINES = 120

LESSONS = [path for path in MODULES if path.parent.name == "lessons" and path.name != "__init__.py"]


def long_functions(source: str) -> list[str]:
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    return [f"{name}: {length} lines" for name, length in lengths.items() if length > MAX_FUNCTION_LINES]


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_a_module_is_short_and_says_which_question_it_answers(path):
    source = path.read_text()
    assert len(source.splitlines()) <= MAX_FILE_LINES
    assert not long_functions(source)
    assert source.startswith('"""')


@pytest.mark.parametrize("path", LESSONS, ids=relative)
def test_a_lesson_fits_on_two_screens(path):
    assert len(path.read_text().splitlines()) <= MAX_LESSON_LINES


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_annotations_can_be_checked_at_run_time(path):
    # jaxtyping reads annotations as objects; postponed, they are strings and nothing is checked.
    source = path.read_text()
    assert not ("from __future__ import annotations" in source and re.search(r"jaxtyping|qkv\.tensors", source))


def test_no_file_is_named_for_nothing():
    vague = {"utils", "util", "helpers", "common", "misc"}
    assert not [path for path in SOURCE.rglob("*") if path.stem in vague]


def test_a_long_function_is_seen():
    assert long_functions("def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES) == ["f: 61 lines"]
