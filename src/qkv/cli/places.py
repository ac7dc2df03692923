"""Where a command computes, and where its run goes unless told."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from qkv.errors import ConfigError

if TYPE_CHECKING:
    import torch


def chosen_device(name: str) -> "torch.device":
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: it is cpu, cuda or auto")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU here")
    return torch.device(name)


def next_run_folder() -> Path:
    number = 1
    while os.path.lexists(f"runs/{number}"):
        number += 1
    return Path(f"runs/{number}")
