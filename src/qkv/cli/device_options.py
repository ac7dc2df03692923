"""Where a command computes, and where its run goes unless told."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.choices import DType
from qkv.cli.progress import say

if TYPE_CHECKING:
    import torch

    from qkv.tasks import Task
    from qkv.tasks.loader import AnyTask

Device = Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda, or auto: a GPU where there is one.")]
Int8 = Annotated[bool, typer.Option("--int8", help="Compute in 8-bit numbers, on the CPU: faster, a bit less exact.")]
Dtype = Annotated[DType, typer.Option(help="The numbers to compute in; bfloat16 is for a GPU.")]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a model computes, and in which numbers."""

    device: str = "auto"
    dtype: DType = DType.FLOAT32
    int8: bool = False

    def load(self, model: str) -> "Task":
        """With what is to be told of it."""
        from qkv.tasks import load

        task = load(model, int8=self.int8, device=self.device, dtype=self.dtype)
        _tell(task, model)
        return task

    def load_as(self, kind: "type[AnyTask]", model: str) -> "AnyTask":
        """As `load`, for those who need one kind of task alone."""
        from qkv.tasks import load_as

        task = load_as(kind, model, int8=self.int8, device=self.device, dtype=self.dtype)
        _tell(task, model)
        return task


def _tell(task: "Task", model: str) -> None:
    for remark in task.remarks:
        say(f"{model}: {remark}")


def chosen_device(name: str) -> "torch.device":
    from qkv.tasks.devices import resolve_device

    return resolve_device(name)


def next_run_folder() -> Path:
    number = 1
    while os.path.lexists(f"runs/{number}"):
        number += 1
    return Path(f"runs/{number}")
