"""A folder of files that is there whole or not at all, and notices every changed byte.

It is written under another name, each file hashed and synced, and renamed into place at the end.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from qkv.data.disk import sync_folder, writing
from qkv.errors import WeightsError
from qkv.text.border import parsed

MANIFEST = "manifest.json"
TORCHS = MappingProxyType({"format": "pt"})
"""Metadata without which some readers refuse a file: whose tensors it holds."""
BLOCK = 4096
PARTIAL = ".partial-"
"""Names that start so are left over from a write that was cut off; they may be deleted."""


def write_folder(
    target: Path,
    *,
    tensors: Mapping[str, Mapping[str, Tensor]],
    texts: Mapping[str, str],
    metadata: Mapping[str, str] = TORCHS,
    further: Callable[[Path], None] = lambda _folder: None,
) -> None:
    """`tensors`: safetensors files by name; `texts`: other files by name. `target` must not exist yet.

    A text's name may have one folder before it (`1_Pooling/config.json`).
    `metadata` goes into the header of every safetensors file: one entry, for the order of several is not fixed.
    `further` writes more files into the folder it is given.
    """
    sizes = [sum(t.numel() * t.element_size() for t in file.values()) for file in tensors.values()]
    sizes += [len(text.encode()) for text in texts.values()]
    # A file takes whole blocks, and one more for its header or its line in the manifest.
    n_needed = sum((size // BLOCK + 2) * BLOCK for size in sizes)
    with making(target, n_needed) as aside:
        for inner in {(aside / name).parent for name in texts} - {aside}:
            inner.mkdir()
        for name, file in tensors.items():
            _save_tensors(aside / name, file, metadata)
        for name, text in texts.items():
            (aside / name).write_text(text, encoding="utf-8")
        further(aside)
        _seal(aside)


@contextmanager
def making(target: Path, n_needed: int) -> Iterator[Path]:
    """A folder to write into, which gets its name at the end; where the disk refuses, nothing is left of it."""
    aside = target.parent / f"{PARTIAL}{target.name}-{os.getpid()}"
    with writing(target, n_needed):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(target.parent).free < n_needed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            yield aside
            aside.rename(target)
            sync_folder(target.parent)
        except OSError:
            shutil.rmtree(aside, ignore_errors=True)
            raise


def check_folder(folder: Path) -> None:
    """Every file is the one that was written: none missing, none more, no byte changed."""
    manifest = _read_manifest(folder)
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*")} - {MANIFEST}
    inner = {str(Path(name).parent) for name in manifest}
    for name in sorted(found - set(manifest) - inner):
        raise WeightsError(f"{folder / name}: not in the manifest, which lists {len(manifest)} files")
    for name, expected in manifest.items():
        path = folder / name
        if name not in found:
            raise WeightsError(f"{path}: missing; the manifest lists it")
        try:
            n_bytes, hashed = path.stat().st_size, digest(path)
        except OSError as error:
            raise WeightsError(f"{path}: cannot be read: {error.strerror}") from None
        if n_bytes != expected["bytes"]:
            raise WeightsError(f"{path}: {n_bytes} bytes, the manifest says {expected['bytes']}")
        if hashed != expected["blake2b"]:
            raise WeightsError(f"{path}: its bytes are not those that were written (hash differs)")


def read_settings(path: Path) -> dict[str, Any]:
    settings = read_json(path)
    if not isinstance(settings, dict):
        raise WeightsError(f"{path}: holds a {type(settings).__name__}, not a table of settings")
    return settings


def read_json(path: Path) -> Any:  # noqa: ANN401 - whatever the file holds, checked by the callers
    try:
        return parsed(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: not valid JSON: {error}") from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise WeightsError(f"{path}: not a safetensors file: {error}") from None


def read_metadata(path: Path) -> dict[str, str]:
    """What the header of a safetensors file says beside its tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise WeightsError(f"{path}: not a safetensors file: {error}") from None


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    contiguous = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
    try:
        save_file(contiguous, path, metadata=dict(metadata))
    except SafetensorError as error:
        # The library tells of a disk that refuses in words alone: "… (os error 28)".
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]), os.strerror(int(number[1]))) if number else error from None


def _seal(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if not path.is_dir())
    entries = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "blake2b": digest(path)} for path in files
    }
    body = json.dumps(entries, indent=1)
    seal = hashlib.blake2b(body.encode(), digest_size=16).hexdigest()
    (folder / MANIFEST).write_text(json.dumps({"files": entries, "blake2b": seal}, indent=1), encoding="utf-8")
    for path in [*files, folder / MANIFEST]:
        path.chmod(0o644)
        sync_folder(path)
    for inner in {path.parent for path in files} | {folder}:
        sync_folder(inner)


def _read_manifest(folder: Path) -> dict[str, dict[str, int | str]]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        entries, seal = manifest["files"], manifest["blake2b"]
        for entry in entries.values():
            _ = entry["bytes"], entry["blake2b"]
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise WeightsError(f"{path}: not a manifest") from None
    if hashlib.blake2b(json.dumps(entries, indent=1).encode(), digest_size=16).hexdigest() != seal:
        raise WeightsError(f"{path}: its own hash differs")
    # The layout is part of what was written: a changed blank is a changed byte.
    if json.dumps({"files": entries, "blake2b": seal}, indent=1).encode() != path.read_bytes():
        raise WeightsError(f"{path}: its bytes are not those that were written")
    return entries
