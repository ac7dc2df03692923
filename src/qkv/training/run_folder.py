"""Run folder: recipe, data, metrics and checkpoints of a training run.

run/
  recipe.toml                  all settings of the run
  data/                        token stores
  data.json                    sizes and hashes of the token stores, checked on resume
  preparation.json             state of an unfinished data preparation (deleted when it is finished)
  metrics.jsonl                one line per training step or evaluation
  checkpoints/step-00000500/   written atomically; manifest.json holds the hash of every file
    model.safetensors  config.json  tokenizer.json  …   needed to use the model
    resume.safetensors  progress.json  [shards/]        needed to resume training
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

from qkv.data.file_io import convert_os_errors_to_disk_error, fsync_path
from qkv.errors import RunError, WeightsError
from qkv.training.sharded_tensors import SHARDS_FOLDER, load_sharded
from qkv.weights.checkpoint_folder import (
    PARTIAL_PREFIX,
    check_folder_matches_manifest,
    read_safetensors,
    write_folder_atomically_with_manifest,
)

LogFunction = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class TrainingProgress:
    """The progress of a run after `step` updates, saved as progress.json in each checkpoint."""

    step: int = 0
    n_tokens: int = 0
    last_eval_step: int = 0
    """Step of the most recent evaluation."""
    best_loss: float | None = None
    """Validation loss in the best evaluation."""
    best_metric_value: float | None = None
    """Value of the metric that determines the best evaluation, unless the loss determines it."""
    best_step: int | None = None
    n_evals_since_best: int = 0
    """Number of evaluations since the best evaluation."""
    seconds: float = 0.0
    metrics_bytes: int = 0
    """Size of metrics.jsonl at this step in bytes. A resumed run truncates the file to this size."""
    environment: str = ""
    """Description of the torch version, thread count and hardware. Rounding may differ in other environments."""


def describe_environment(device: torch.device) -> str:
    """Describe the torch version, thread count and hardware.

    Besides the settings and the data, they affect rounding.
    """
    if device.type == "cuda":
        return f"torch {torch.__version__}, {torch.cuda.get_device_name(device)}"
    kind = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads, {kind}"


class RunFolder:
    """The folder of a training run, with methods to read and write its files."""

    def __init__(self, path: Path, *, created_folders: tuple[Path, ...] = ()) -> None:
        """Set the paths of the run's files without creating the folder.

        `created_folders` are the folders that `create` created for this run, innermost first.
        """
        self.path = path
        self._created_folders = created_folders
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"

    @classmethod
    def create(cls, path: Path) -> "RunFolder":
        """Create a new folder or use an existing empty one.

        Raises `RunError` instead of overwriting another run.
        """
        if path.exists() and not path.is_dir():
            raise RunError(f"{path}: must be a new or empty folder, got a file")
        created_folders = tuple(folder for folder in (path, *path.parents) if not folder.exists())
        with convert_os_errors_to_disk_error(path, 0):
            path.mkdir(parents=True, exist_ok=True)
            existing = sorted(entry.name for entry in path.iterdir() if entry.suffix != ".partial")
        if existing:
            verb = "finetune" if "finetune.toml" in existing else "train"
            raise RunError(
                f"{path}: must be a new or empty folder, but contains {existing[0]}; choose another --out, or resume "
                f"the run with: qkv {verb} --resume {path}"
            )
        return cls(path, created_folders=created_folders)

    def discard(self) -> None:
        """Delete the contents of the folder and the folders that `create` created.

        This method is called if the input of a run is invalid.
        """
        for leftover in self.path.iterdir():
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        with suppress(OSError):  # another run may have been created in the parent folder in the meantime
            for folder in self._created_folders:
                folder.rmdir()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold an exclusive lock on the folder while the context is active.

        The lock is released even if the process is killed.
        """
        handle = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(f"{self.path}: the folder is in use by another training process") from None
            yield
        finally:
            os.close(handle)

    def checkpoint_steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in ascending order. The checkpoints may be damaged."""
        names = (re.fullmatch(r"step-(\d{8,})", folder.name) for folder in self.checkpoints.glob("step-*"))
        return sorted(int(name[1]) for name in names if name)

    def checkpoint_folder(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def save(
        self,
        progress: TrainingProgress,
        *,
        tensors: Mapping[str, Mapping[str, Tensor]],
        texts: Mapping[str, str],
        write_extra_files: Callable[[Path], None] = lambda _folder: None,
    ) -> None:
        """Write the checkpoint of this step unless it already exists.

        Before the checkpoint is finalized, `write_extra_files` is called with the temporary folder to write additional
        files.
        """
        if self.checkpoint_folder(progress.step).exists():
            return
        if self.metrics.exists():
            with convert_os_errors_to_disk_error(self.metrics, 0):
                fsync_path(self.metrics)
        state = json.dumps(asdict(progress), indent=1)
        texts = {**texts, "progress.json": state}
        write_folder_atomically_with_manifest(
            self.checkpoint_folder(progress.step),
            tensors=tensors,
            text_files=texts,
            write_extra_files=write_extra_files,
        )

    def delete_old_checkpoints(self, *, keep: int, best: int | None) -> None:
        """Delete all checkpoints except the last `keep` and the best one."""
        with convert_os_errors_to_disk_error(self.checkpoints, 0):
            for step in self.checkpoint_steps()[:-keep]:
                if step != best:
                    self._delete_checkpoint(step)

    def _delete_checkpoint(self, step: int) -> None:
        # Rename the checkpoint before deleting it so that an interrupted deletion never leaves an incomplete
        # checkpoint.
        deleted_folder = self.checkpoints / f"{PARTIAL_PREFIX}old-{step}"
        self.checkpoint_folder(step).rename(deleted_folder)
        shutil.rmtree(deleted_folder)

    def latest_valid_checkpoint(self, log: LogFunction) -> tuple[TrainingProgress, Path]:
        """Return the latest checkpoint whose hashes are correct.

        Errors in later checkpoints are logged.
        """
        steps = self.checkpoint_steps()
        for step in reversed(steps):
            folder = self.checkpoint_folder(step)
            try:
                check_folder_matches_manifest(folder)
                return load_progress(folder, step), folder
            except WeightsError as error:
                is_oldest = step == steps[0]
                log(f"{error}; {'no earlier checkpoint exists' if is_oldest else 'using the previous checkpoint'}")
        raise RunError(f"{self.path}: cannot resume because none of the {len(steps)} checkpoints is valid")

    def best_or_latest_checkpoint(self) -> Path:
        """Return the best checkpoint if it still exists, and the latest valid checkpoint otherwise.

        Hashes are checked.
        """
        progress, folder = self.latest_valid_checkpoint(lambda _message: None)
        if progress.best_step is not None and self.checkpoint_folder(progress.best_step).is_dir():
            folder = self.checkpoint_folder(progress.best_step)
            check_folder_matches_manifest(folder)
        return folder

    def discard_later_checkpoints_and_metrics(self, progress: TrainingProgress, log: LogFunction) -> None:
        """Delete everything written after this checkpoint: incomplete folders, later checkpoints and later metrics."""
        with convert_os_errors_to_disk_error(self.checkpoints, 0):
            for leftover in self.checkpoints.glob(f"{PARTIAL_PREFIX}*"):
                shutil.rmtree(leftover)
            for step in self.checkpoint_steps():
                if step > progress.step:
                    self._delete_checkpoint(step)
        n_bytes = self.metrics_bytes()
        if n_bytes < progress.metrics_bytes:
            log(f"{self.metrics}: only {n_bytes} of {progress.metrics_bytes} bytes exist, so some metrics are missing")
        elif n_bytes:
            with convert_os_errors_to_disk_error(self.metrics, 0):
                os.truncate(self.metrics, progress.metrics_bytes)

    def log(self, entry: Mapping[str, Any]) -> None:
        line = json.dumps(entry) + "\n"
        with convert_os_errors_to_disk_error(self.metrics, len(line)), self.metrics.open("a", encoding="utf-8") as file:
            file.write(line)

    def metrics_bytes(self) -> int:
        return self.metrics.stat().st_size if self.metrics.exists() else 0


def load_progress(folder: Path, expected_step: int) -> TrainingProgress:
    path = folder / "progress.json"
    try:
        progress = TrainingProgress(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise WeightsError(f"{path}: invalid training progress: {error}") from None
    if progress.step != expected_step:
        raise WeightsError(f"{folder}: must contain the checkpoint of step {expected_step}, got step {progress.step}")
    return progress


def load_checkpoint(
    folder: Path, like: Mapping[str, Tensor] = MappingProxyType({})
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Load the model weights and the resume state of a checkpoint.

    Sharded parts of the resume state are sharded to match the model parameters in `like`.
    """
    weights, resume = read_safetensors(folder / "model.safetensors"), read_safetensors(folder / "resume.safetensors")
    if (folder / SHARDS_FOLDER).is_dir():
        resume |= load_sharded(folder / SHARDS_FOLDER, like)
    return weights, resume
