"""Command-line options for the device and data type, and the default run folder."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.choices import BackendName, InferenceDType
from qkv.cli.progress import print_status

if TYPE_CHECKING:
    import torch

    from qkv.tasks import Task
    from qkv.tasks.loader import AnyTask

DeviceOption = Annotated[
    str,
    typer.Option(metavar="NAME", help="Device to run on: cpu, cuda or auto (a GPU if one is available)."),
]
Int8Option = Annotated[
    bool,
    typer.Option(
        "--int8",
        help="Quantize weights and activations to int8, which is faster but slightly less accurate (CPU only).",
    ),
]
DtypeOption = Annotated[InferenceDType, typer.Option(help="Data type of the weights and activations.")]

BackendOption = Annotated[
    BackendName,
    typer.Option(
        help="Implementation of the model: auto (the fastest that supports the model), eager (plain PyTorch), cpu or "
        "cuda. `qkv doctor` lists which backends support which models."
    ),
]


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """The device, data type and backend that a command uses for its model."""

    device: str = "auto"
    dtype: InferenceDType = InferenceDType.FLOAT32
    int8: bool = False
    backend: BackendName = BackendName.AUTO

    def load_task_and_print_remarks(self, model: str) -> "Task":
        """Load a model and print its warnings."""
        from qkv.tasks import load

        task = load(model, int8=self.int8, device=self.device, dtype=self.dtype, backend=self.backend)
        _print_remarks(task, model)
        return task

    def load_task_as_and_print_remarks(self, kind: "type[AnyTask]", model: str) -> "AnyTask":
        """Load a model, check that it has the given task type, and print its warnings."""
        from qkv.tasks import load_as

        task = load_as(kind, model, int8=self.int8, device=self.device, dtype=self.dtype, backend=self.backend)
        _print_remarks(task, model)
        return task


def _print_remarks(task: "Task", model: str) -> None:
    for remark in task.remarks:
        print_status(f"{model}: {remark}")


def select_device(name: str) -> "torch.device":
    """Return the torch device for `cpu`, `cuda` or `auto`. Torch is imported only when this function is called."""
    from qkv.tasks.devices import resolve_device

    return resolve_device(name)


def next_run_folder() -> Path:
    """Return the first path of runs/1, runs/2, … that does not exist."""
    number = 1
    while os.path.lexists(f"runs/{number}"):
        number += 1
    return Path(f"runs/{number}")
