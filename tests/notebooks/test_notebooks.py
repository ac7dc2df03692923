"""The notebooks run: with small sizes in the test process, and in full in a separate kernel (long tests)."""

import ast
import json
import os
from pathlib import Path

import nbformat
import pytest
from notebooks.run import execute_notebook

from qkv import lessons

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MAX_BYTES = 300_000
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])


def read_code_cells(path: Path) -> list[str]:
    return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def run_cell(source: str, names: dict) -> None:
    """Run a cell and display the value of its last line, as a kernel does. Displaying a figure renders it."""
    *lines, last = ast.parse(source).body
    has_value = isinstance(last, ast.Expr) and not source.rstrip().endswith(";")
    exec(compile(ast.Module([*lines] if has_value else [*lines, last], []), "cell", "exec"), names)
    if has_value:
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        for method in ("_repr_png_", "_repr_mimebundle_"):
            if hasattr(value, method):
                assert getattr(value, method)()


@each_notebook
def test_a_notebook_runs_with_small_sizes(path, monkeypatch, tmp_path):
    """Lessons have their own tests, so this test only checks that they exist."""
    monkeypatch.setenv("QKV_SHORT", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lessons, "run", lambda name: lambda: lessons.LESSONS[name])
    names: dict = {"__name__": "__main__"}
    for source in read_code_cells(path):
        run_cell(source, names)


@pytest.mark.long
@each_notebook
def test_a_notebook_runs_in_full_in_a_kernel(path):
    assert len(nbformat.writes(execute_notebook(path))) < MAX_BYTES


@each_notebook
def test_a_stored_notebook_is_small_and_has_figures_and_no_errors(path):
    notebook = json.loads(path.read_text())
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    assert path.stat().st_size < MAX_BYTES
    assert [output for output in outputs if output["output_type"] == "error"] == []
    assert any("image/png" in output.get("data", {}) for output in outputs)


@each_notebook
def test_a_stored_notebook_contains_no_local_paths(path):
    assert str(Path.home()) + os.sep not in path.read_text()
    assert str(FOLDER.parent) + os.sep not in path.read_text()


def test_there_is_a_notebook_for_each_lecture_and_five_others():
    assert len(NOTEBOOKS) == 10
    assert [path.stem[:2] for path in NOTEBOOKS if path.stem[1] == "-"] == ["a-", "b-", "c-", "d-", "e-"]
