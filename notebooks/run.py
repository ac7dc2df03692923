"""Run notebooks from top to bottom, each in a kernel of its own, and keep what they show: `make notebooks`."""

import base64
import os
import sys
import time
from io import BytesIO
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

HERE = Path(__file__).parent
SECONDS = 600
"""For one cell, on a busy machine."""
COLOURS = 96
"""Of a kept picture: enough for a heat map, and a quarter of the bytes."""


def executed(path: Path, *, short: bool = False) -> nbformat.NotebookNode:
    """The notebook with fresh outputs. `short`: smaller sizes in the same cells, as the first cell says."""
    notebook = nbformat.read(path, as_version=4)
    kernel_sees = {**os.environ, "QKV_SHORT": "1" if short else "", "PATH": _with_our_commands()}
    # Two threads that wait for each other on a busy machine took twenty times as long as one.
    kernel_sees.setdefault("OMP_NUM_THREADS", "1")
    client = NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(HERE)}},
        # A widget's state is the whole page: too much to keep.
        store_widget_state=False, record_timing=False,
        extra_arguments=["--log-level=40"],
    )  # fmt: skip
    client.execute(env=kernel_sees)
    # Versions and numbers of runs would differ each time.
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = _joined(cell.outputs)
            for output in cell.outputs:
                _tidy(output)
    return notebook


def _joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """What was printed comes in as many pieces as time would have it."""
    joined: list[nbformat.NotebookNode] = []
    for output in outputs:
        if joined and output.output_type == "stream" == joined[-1].output_type and output.name == joined[-1].name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def _tidy(output: nbformat.NotebookNode) -> None:
    if "execution_count" in output:
        output.execution_count = None
    shown = output.get("data", {})
    shown.pop("text/html", None)  # the explorer's page, whole
    if "image/png" in shown:
        made = BytesIO()
        picture = Image.open(BytesIO(base64.b64decode(shown["image/png"]))).convert("RGB")
        picture.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
            made, format="png", optimize=True
        )
        shown["image/png"] = base64.b64encode(made.getvalue()).decode()
        shown.pop("text/plain", None)  # <Figure size …>


def _with_our_commands() -> str:
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))


def main(names: list[str]) -> None:
    paths = [HERE / name for name in names] or sorted(HERE.glob("*.ipynb"))
    for path in paths:
        if not path.is_file():
            known = ", ".join(sorted(one.name for one in HERE.glob("*.ipynb")))
            sys.exit(f"there is no notebook {path.name}; there are {known}")
    for path in paths:
        before = time.perf_counter()
        nbformat.write(executed(path), path)
        took = time.perf_counter() - before
        print(f"{path.name}: {took:.0f} s, {path.stat().st_size // 1000} KB")


if __name__ == "__main__":
    main(sys.argv[1:])
