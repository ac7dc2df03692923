"""A run's folder: its settings, its metrics, its checkpoints.

run/
  recipe.toml                  what was asked for, every setting
  data/                        the texts as token stores
  data.json                    their sizes and hashes: a run goes on with these alone
  preparing.json               only until the stores are there: what making them needs
  metrics.jsonl                one line a step or evaluation
  checkpoints/step-00000500/   whole or not there; manifest.json holds every file's hash
    model.safetensors  config.json  tokenizer.json  …   what others load
    resume.safetensors  progress.json  [pieces/]        what going on needs
"""

import fcntl
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from qkv.data.disk import sync_folder, writing
from qkv.errors import RunError, WeightsError
from qkv.training.pieces import PIECES, read_pieces
from qkv.weights.folder import PARTIAL, check_folder, read_tensors, write_folder

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands, after `step` updates."""

    step: int = 0
    n_tokens: int = 0
    evaluated_step: int = 0
    """The last step whose validation loss is known."""
    best_loss: float | None = None
    """The best evaluation's."""
    best_measure: float | None = None
    """Where a measure decides which is the best."""
    best_step: int | None = None
    n_worse: int = 0
    """Evaluations since the best one."""
    seconds: float = 0.0
    metrics_bytes: int = 0
    """How much of metrics.jsonl belongs to this state."""
    made_on: str = ""
    """Build, threads and machine; on others the numbers may differ in the last bit."""


def this_machine(device: torch.device) -> str:
    """What, besides settings and data, decides the last bits of every number."""
    if device.type == "cuda":
        return f"torch {torch.__version__}, {torch.cuda.get_device_name(device)}"
    kind = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads, {kind}"


class RunFolder:
    """Reads and writes a run; the trainer decides when."""

    def __init__(self, path: Path, *, made: tuple[Path, ...] = ()) -> None:
        """`made`: the folders that were not there before this run, innermost first."""
        self.path = path
        self._made = made
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"

    @classmethod
    def create(cls, path: Path) -> "RunFolder":
        """A new folder, or an empty one; a run never writes over another."""
        if path.exists() and not path.is_dir():
            raise RunError(f"{path}: is a file; a run needs a folder, new or empty")
        made = tuple(place for place in (path, *path.parents) if not place.exists())
        with writing(path, 0):
            path.mkdir(parents=True, exist_ok=True)
            held = sorted(there.name for there in path.iterdir() if there.suffix != ".partial")
        if held:
            verb = "finetune" if "finetune.toml" in held else "train"
            raise RunError(
                f"{path}: is not empty (it holds {held[0]}); give another --out, or go on: qkv {verb} --resume {path}"
            )
        return cls(path, made=made)

    def discard(self) -> None:
        """Undo `create`, for a run that was refused: all that lies in the folder goes, and what was made for it."""
        for left_over in self.path.iterdir():
            shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink()
        with suppress(OSError):  # another run may lie beside it by now
            for place in self._made:
                place.rmdir()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Inside the `with` no other process can train here. However this one ends, the lock ends with it."""
        handle = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(f"{self.path}: another process is training here") from None
            yield
        finally:
            os.close(handle)

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, oldest first; not all need be good."""
        names = (re.fullmatch(r"step-(\d{8,})", folder.name) for folder in self.checkpoints.glob("step-*"))
        return sorted(int(name[1]) for name in names if name)

    def folder(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def save(
        self, progress: Progress, *, tensors: Mapping[str, Mapping[str, Tensor]], texts: Mapping[str, str],
        further: Callable[[Path], None] = lambda _folder: None,
    ) -> None:  # fmt: skip
        """Write the checkpoint of this step; one that is there already is of the same step and stays.

        `further` writes more files into the folder it is given, before that is sealed.
        """
        if self.folder(progress.step).exists():
            return
        if self.metrics.exists():
            with writing(self.metrics, 0):
                sync_folder(self.metrics)
        state = json.dumps(asdict(progress), indent=1)
        texts = {**texts, "progress.json": state}
        write_folder(self.folder(progress.step), tensors=tensors, texts=texts, further=further)

    def rotate(self, *, keep: int, best: int | None) -> None:
        """Delete what is neither among the last `keep` nor the best. Renamed first, so that none is ever half there."""
        with writing(self.checkpoints, 0):
            for step in self.steps()[:-keep]:
                if step != best:
                    self._delete(step)

    def _delete(self, step: int) -> None:
        aside = self.checkpoints / f"{PARTIAL}old-{step}"
        self.folder(step).rename(aside)
        shutil.rmtree(aside)

    def last_good(self, say: Say) -> tuple[Progress, Path]:
        """The newest checkpoint whose every byte is right; what is wrong with newer ones is said."""
        steps = self.steps()
        for step in reversed(steps):
            folder = self.folder(step)
            try:
                check_folder(folder)
                return read_progress(folder, step), folder
            except WeightsError as error:
                say(f"{error}; {'there is no' if step == steps[0] else 'falling back to the'} checkpoint before")
        raise RunError(f"{self.path}: no checkpoint is good, of {len(steps)}: nothing to go on from")

    def best(self) -> Path:
        """The checkpoint with the lowest validation loss that is kept, else the last; its bytes are checked."""
        progress, folder = self.last_good(lambda _said: None)
        if progress.best_step is not None and self.folder(progress.best_step).is_dir():
            folder = self.folder(progress.best_step)
            check_folder(folder)
        return folder

    def tidy(self, progress: Progress, say: Say) -> None:
        """Undo what came after the checkpoint: half-written folders, newer checkpoints, newer metrics."""
        with writing(self.checkpoints, 0):
            for left_over in self.checkpoints.glob(f"{PARTIAL}*"):
                shutil.rmtree(left_over)
            for step in self.steps():
                if step > progress.step:
                    self._delete(step)
        n_bytes = self.metrics_bytes()
        if n_bytes < progress.metrics_bytes:
            say(f"{self.metrics}: {n_bytes} bytes of {progress.metrics_bytes} are left: the curve has a gap")
        elif n_bytes:
            with writing(self.metrics, 0):
                os.truncate(self.metrics, progress.metrics_bytes)

    def log(self, entry: Mapping[str, Any]) -> None:
        line = json.dumps(entry) + "\n"
        with writing(self.metrics, len(line)), self.metrics.open("a", encoding="utf-8") as file:
            file.write(line)

    def metrics_bytes(self) -> int:
        return self.metrics.stat().st_size if self.metrics.exists() else 0


def read_progress(folder: Path, step: int) -> Progress:
    path = folder / "progress.json"
    try:
        progress = Progress(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise WeightsError(f"{path}: not the progress of a run: {error}") from None
    if progress.step != step:
        raise WeightsError(f"{folder}: holds the checkpoint of step {progress.step}")
    return progress


def read_checkpoint(
    folder: Path, like: Mapping[str, Tensor] = MappingProxyType({})
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights to use, and what going on needs; that may be in pieces, which are cut as `like`, the parameters, are."""
    used, resume = read_tensors(folder / "model.safetensors"), read_tensors(folder / "resume.safetensors")
    if (folder / PIECES).is_dir():
        resume |= read_pieces(folder / PIECES, like)
    return used, resume
