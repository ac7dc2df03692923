"""The notebooks run from top to bottom: in a short form here in this process, whole in a kernel of their own."""

import ast
import json
import os
from pathlib import Path

import nbformat
import pytest
from notebooks.run import executed

from qkv import lessons

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST_BYTES = 300_000
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])


def code_of(path: Path) -> list[str]:
    return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def run_cell(source: str, names: dict) -> None:
    """As a kernel does it: the last line's value is shown, which draws a picture."""
    *lines, last = ast.parse(source).body
    shows = isinstance(last, ast.Expr) and not source.rstrip().endswith(";")
    exec(compile(ast.Module([*lines] if shows else [*lines, last], []), "cell", "exec"), names)
    if shows:
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        for method in ("_repr_png_", "_repr_mimebundle_"):
            if hasattr(value, method):
                assert getattr(value, method)()


@each
def test_a_notebook_runs_in_its_short_form(path, monkeypatch, tmp_path):
    """Lessons have tests of their own; here it is enough that they are there."""
    monkeypatch.setenv("QKV_SHORT", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lessons, "run", lambda name: lambda: lessons.LESSONS[name])
    names: dict = {"__name__": "__main__"}
    for source in code_of(path):
        run_cell(source, names)


@pytest.mark.long
@each
def test_a_notebook_runs_whole_in_a_kernel(path):
    assert len(nbformat.writes(executed(path))) < MOST_BYTES


@each
def test_a_notebook_is_kept_small_with_what_it_shows(path):
    notebook = json.loads(path.read_text())
    shown = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    assert path.stat().st_size < MOST_BYTES
    assert [output for output in shown if output["output_type"] == "error"] == []
    assert any("image/png" in output.get("data", {}) for output in shown)


@each
def test_a_notebook_leaves_no_trace_of_where_it_ran(path):
    assert str(Path.home()) + os.sep not in path.read_text()
    assert str(FOLDER.parent) + os.sep not in path.read_text()


def test_there_is_one_for_each_lecture_and_five_more():
    assert len(NOTEBOOKS) == 10
    assert [path.stem[:2] for path in NOTEBOOKS if path.stem[1] == "-"] == ["a-", "b-", "c-", "d-", "e-"]
