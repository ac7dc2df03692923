"""Export the metrics of a run to TensorBoard."""

import json
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

from qkv.errors import MissingExtraError


def import_tensorboard() -> Any:  # noqa: ANN401 - a library that may be missing
    try:
        return import_module("torch.utils.tensorboard")
    except ImportError:
        raise MissingExtraError(
            "TensorBoard files require the tensorboard package; install it with: pip install tensorboard"
        ) from None


def rewrite_tensorboard_events(metrics_path: Path, folder: Path) -> None:
    """Write every number in metrics.jsonl as a TensorBoard scalar, replacing the contents of the folder."""
    library = import_tensorboard()
    shutil.rmtree(folder, ignore_errors=True)
    with library.SummaryWriter(folder) as writer:
        for line in metrics_path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            step = entry.pop("step")
            for name, value in entry.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    writer.add_scalar(name, value, step)
