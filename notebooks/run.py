"""Execute notebooks in separate kernels and store their outputs: `make notebooks`."""

import base64
import os
import sys
import time
from io import BytesIO
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).parent
CELL_TIMEOUT = 600
"""Maximum number of seconds per cell, long enough for a busy machine."""
N_COLORS = 96
"""Number of colors of stored figures: enough for a heatmap, at a quarter of the file size."""


def execute_notebook(path: Path, *, short: bool = False) -> nbformat.NotebookNode:
    """Return the notebook with new outputs.

    `short` sets QKV_SHORT, which makes the cells of a notebook use smaller sizes.
    """
    notebook = nbformat.read(path, as_version=4)
    environment = {**os.environ, "QKV_SHORT": "1" if short else "", "PATH": _path_with_interpreter()}
    # On a busy machine, two threads that wait for each other were 20 times as slow as a single thread.
    environment.setdefault("OMP_NUM_THREADS", "1")
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
        # The state of the explorer widget contains the complete page, which is too large to store.
        store_widget_state=False,
        record_timing=False,
        extra_arguments=["--log-level=40"],
    )
    client.execute(env=environment)
    # Python versions and execution counts would change with every run.
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = _merge_streams(cell.outputs)
            for output in cell.outputs:
                _clean_output(output)
    return notebook


def _merge_streams(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Merge consecutive outputs of the same stream, because their number depends on timing."""
    merged: list[nbformat.NotebookNode] = []
    for output in outputs:
        if merged and output.output_type == "stream" == merged[-1].output_type and output.name == merged[-1].name:
            merged[-1].text += output.text
        else:
            merged.append(output)
    return merged


def _clean_output(output: nbformat.NotebookNode) -> None:
    """Remove run-dependent and large data from an output, and reduce the number of colors of its figure."""
    if "execution_count" in output:
        output.execution_count = None
    data = output.get("data", {})
    data.pop("text/html", None)  # the complete explorer page
    if "image/png" in data:
        buffer = BytesIO()
        image = Image.open(BytesIO(base64.b64decode(data["image/png"]))).convert("RGB")
        image.quantize(N_COLORS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
            buffer, format="png", optimize=True
        )
        data["image/png"] = base64.b64encode(buffer.getvalue()).decode()
        data.pop("text/plain", None)  # <Figure size …>


def _path_with_interpreter() -> str:
    """Return PATH with the folder of the running interpreter first, so that cells use its `qkv` command."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))


def main(names: list[str]) -> None:
    available = sorted(FOLDER.glob("*.ipynb"))
    paths = [FOLDER / name for name in names] or available
    for path in paths:
        if not path.is_file():
            sys.exit(f"no notebook {path.name}; available notebooks: {', '.join(path.name for path in available)}")
    for path in paths:
        start = time.perf_counter()
        nbformat.write(execute_notebook(path), path)
        seconds = time.perf_counter() - start
        print(f"{path.name}: {seconds:.0f} s, {path.stat().st_size // 1000} KB")


if __name__ == "__main__":
    main(sys.argv[1:])
