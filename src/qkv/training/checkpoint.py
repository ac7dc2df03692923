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
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from qkv.data.file_io import convert_os_errors_to_disk_error, fsync_path, read_json_object, write_atomically
from qkv.errors import DiskError, RunError, WeightsError
from qkv.weights.checkpoint_folder import (
    PARTIAL_PREFIX,
    check_folder_matches_manifest,
    read_safetensors,
    write_folder_atomically_with_manifest,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

SHARDS_FOLDER = "shards"
"""Subfolder of a checkpoint to which every process writes its shards."""


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    # The exact type check avoids the slow import for ordinary tensors.
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather the full tensor on every rank. This is a collective operation for sharded tensors."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def shard_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Shard a full tensor in the same way as `other`.

    Every rank slices its own copy, so nothing is communicated. The tensor is returned unchanged if `other` is not
    sharded, `tensor` is already sharded, or their shapes differ.
    """
    if not is_sharded(other) or is_sharded(tensor) or tensor.shape != other.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements, src_data_rank=None)


def save_sharded_safetensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Save sharded tensors as safetensors files.

    This is a collective operation in which every rank writes its own shards.
    """
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageWriter, save

    try:
        save(
            {name: tensor.detach() for name, tensor in tensors.items()},
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
        )
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise DiskError(f"{folder}: cannot write: {reason}") from None


def load_sharded(folder: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Load tensors written by `save_sharded_safetensors`, sharded to match the model parameters in `like`.

    The number of ranks may have changed since the tensors were saved. Tensor names have the form `kind/parameter` or
    `kind/parameter/state`, and each tensor has the shape of its parameter.
    """
    from torch.distributed import is_initialized
    from torch.distributed.checkpoint import HuggingFaceStorageReader, TensorStorageMetadata, load

    reader = HuggingFaceStorageReader(str(folder))
    tensors: dict[str, Tensor] = {}
    for name, stored in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)  # a safetensors file contains nothing else
        parameter, size = like.get(name.split("/")[1]), tuple(stored.size)
        if parameter is None or parameter.shape != size:
            expected = (
                "does not exist in the model"
                if parameter is None
                else f"has shape {tuple(parameter.shape)} in the model"
            )
            raise RunError(
                f"{folder}: {name} has shape {size} in the checkpoint, but {expected}; was the recipe changed?"
            )
        tensors[name] = torch.empty_like(parameter, requires_grad=False)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled"
        )  # intended: without torchrun, a single process loads all shards
        load(tensors, storage_reader=reader, no_dist=not is_initialized())
    return tensors


FINGERPRINTS_FILE = "data.json"
FULL_HASH_LIMIT = 64 << 20
"""Maximum size in bytes of files that are hashed in full. For larger files, the first and last 32 MiB are hashed."""


def record_fingerprints(run: Path, data: Path) -> None:
    """Write the size and hash of every file in the data folder to the run folder."""
    files = sorted(path for path in data.rglob("*") if path.is_file())
    fingerprints = {str(path.relative_to(run)): _describe_size_and_partial_hash(path) for path in files}
    write_atomically(run / FINGERPRINTS_FILE, json.dumps(fingerprints, indent=1).encode())


def check_fingerprints(run: Path) -> None:
    """Raise `RunError` if a data file has changed since its fingerprint was recorded.

    Runs created by older versions have no fingerprints and are not checked.
    """
    if not (run / FINGERPRINTS_FILE).is_file():
        return
    for name, expected in read_json_object(run / FINGERPRINTS_FILE).items():
        path = run / name
        actual = _describe_size_and_partial_hash(path) if path.is_file() else "no file"
        if actual != expected:
            raise RunError(f"{path}: the file has changed since the run started: expected {expected}, got {actual}")


def _describe_size_and_partial_hash(path: Path) -> str:
    size = path.stat().st_size
    digest = blake2b(digest_size=8)
    with path.open("rb") as stream:
        digest.update(stream.read(FULL_HASH_LIMIT if size <= FULL_HASH_LIMIT else FULL_HASH_LIMIT // 2))
        stream.seek(max(stream.tell(), size - FULL_HASH_LIMIT // 2))
        digest.update(stream.read())
    return f"{size:,} bytes, hash {digest.hexdigest()}"


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
