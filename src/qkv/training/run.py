"""A run's folder: its settings, its metrics, its checkpoints.

run/
  recipe.toml                  what was asked for, every setting
  metrics.jsonl                one line a step or evaluation
  checkpoints/step-00000500/   whole or not there; manifest.json holds every file's hash
    model.safetensors  config.json  tokenizer.json  …   what others load
    resume.safetensors  progress.json                   what going on needs
"""

import json
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkv.errors import RunError, WeightsError
from qkv.weights.folder import PARTIAL, check_folder, read_tensors, sync, write_folder

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands, after `step` updates."""

    step: int = 0
    n_tokens: int = 0
    evaluated_step: int = 0
    """The last step whose validation loss is known."""
    best_loss: float | None = None
    best_step: int | None = None
    n_worse: int = 0
    """Evaluations since the best one."""
    seconds: float = 0.0
    metrics_bytes: int = 0
    """How much of metrics.jsonl belongs to this state."""
    made_on: str = ""
    """Build, threads and machine; on others the numbers may differ in the last bit."""


def this_machine() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads, {device}"


class RunFolder:
    """Reads and writes a run; the trainer decides when."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"

    @classmethod
    def create(cls, path: Path) -> "RunFolder":
        """A new folder, or an empty one; a run never writes over another."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            is_empty = not any(path.iterdir())
        except OSError as error:
            raise RunError(f"{path}: cannot be made: {error.strerror}") from None
        if not is_empty:
            raise RunError(f"{path}: not empty; give another --out, or go on with --resume {path}")
        return cls(path)

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, oldest first; not all need be good."""
        return sorted(int(folder.name.removeprefix("step-")) for folder in self.checkpoints.glob("step-*"))

    def folder(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def save(
        self, progress: Progress, *, tensors: Mapping[str, Mapping[str, Tensor]], texts: Mapping[str, str]
    ) -> None:
        """Write the checkpoint of this step; one that is there already is of the same step and stays."""
        if self.folder(progress.step).exists():
            return
        if self.metrics.exists():
            sync(self.metrics)
        state = json.dumps(asdict(progress), indent=1)
        write_folder(self.folder(progress.step), tensors=tensors, texts={**texts, "progress.json": state})

    def rotate(self, *, keep: int, best: int | None) -> None:
        """Delete what is neither among the last `keep` nor the best. Renamed first, so that none is ever half there."""
        for step in self.steps()[:-keep]:
            if step != best:
                aside = self.checkpoints / f"{PARTIAL}old-{step}"
                self.folder(step).rename(aside)
                shutil.rmtree(aside)

    def last_good(self, say: Say) -> tuple[Progress, Path]:
        """The newest checkpoint whose every byte is right; what is wrong with newer ones is said."""
        for step in reversed(self.steps()):
            folder = self.folder(step)
            try:
                check_folder(folder)
            except WeightsError as error:
                say(f"{error}; falling back to the checkpoint before")
                continue
            return Progress(**json.loads((folder / "progress.json").read_text(encoding="utf-8"))), folder
        raise RunError(f"{self.path}: no good checkpoint to go on from ({len(self.steps())} were found)")

    def best(self) -> Path:
        """The checkpoint with the lowest validation loss that is kept, else the last; its bytes are checked."""
        progress, folder = self.last_good(lambda _said: None)
        if progress.best_step is not None and self.folder(progress.best_step).is_dir():
            folder = self.folder(progress.best_step)
            check_folder(folder)
        return folder

    def tidy(self, progress: Progress) -> None:
        """Undo what came after the checkpoint: half-written folders, newer checkpoints, newer metrics."""
        for left_over in self.checkpoints.glob(f"{PARTIAL}*"):
            shutil.rmtree(left_over)
        for step in self.steps():
            if step > progress.step:
                shutil.rmtree(self.folder(step))
        n_bytes = self.metrics.stat().st_size if self.metrics.exists() else 0
        if n_bytes < progress.metrics_bytes:
            raise RunError(f"{self.metrics}: {n_bytes} bytes, the checkpoint was made at {progress.metrics_bytes}")
        if n_bytes:
            with self.metrics.open("r+b") as file:
                file.truncate(progress.metrics_bytes)

    def log(self, entry: Mapping[str, Any]) -> None:
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def metrics_bytes(self) -> int:
        return self.metrics.stat().st_size if self.metrics.exists() else 0


def read_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights to use, and what going on needs."""
    return read_tensors(folder / "model.safetensors"), read_tensors(folder / "resume.safetensors")
