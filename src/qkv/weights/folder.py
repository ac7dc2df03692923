"""A folder of files that is there whole or not at all, and notices every changed byte.

It is written under another name, each file hashed and synced, and renamed into place at the end.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from qkv.errors import WeightsError

MANIFEST = "manifest.json"
PARTIAL = ".partial-"
"""Names that start so are left over from a write that was cut off; they may be deleted."""


def write_folder(target: Path, *, tensors: Mapping[str, Mapping[str, Tensor]], texts: Mapping[str, str]) -> None:
    """`tensors`: safetensors files by name; `texts`: other files by name. `target` must not exist yet."""
    n_needed = sum(t.numel() * t.element_size() for file in tensors.values() for t in file.values())
    aside = target.parent / f"{PARTIAL}{target.name}-{os.getpid()}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        n_free = shutil.disk_usage(target.parent).free
        if n_free < n_needed:
            raise WeightsError(_no_room(target, n_needed, n_free))
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        for name, file in tensors.items():
            save_file({key: t.detach().contiguous() for key, t in file.items()}, aside / name)
        for name, text in texts.items():
            (aside / name).write_text(text, encoding="utf-8")
        _seal(aside)
        aside.rename(target)
        sync(target.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise WeightsError(_cannot_write(target, n_needed, error)) from None


def check_folder(folder: Path) -> None:
    """Every file is the one that was written: none missing, none more, no byte changed."""
    manifest = _read_manifest(folder)
    found = {path.name for path in folder.iterdir()} - {MANIFEST}
    for name in sorted(found - set(manifest)):
        raise WeightsError(f"{folder / name}: not in the manifest, which lists {len(manifest)} files")
    for name, expected in manifest.items():
        path = folder / name
        if name not in found:
            raise WeightsError(f"{path}: missing; the manifest lists it")
        if path.stat().st_size != expected["bytes"]:
            raise WeightsError(f"{path}: {path.stat().st_size} bytes, the manifest says {expected['bytes']}")
        if digest(path) != expected["blake2b"]:
            raise WeightsError(f"{path}: its bytes are not those that were written (hash differs)")


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise WeightsError(f"{path}: not a safetensors file: {error}") from None


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def sync(path: Path) -> None:
    """What was written to this file, or into this folder, is on the disk when this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _seal(folder: Path) -> None:
    files = sorted(folder.iterdir())
    entries = {path.name: {"bytes": path.stat().st_size, "blake2b": digest(path)} for path in files}
    body = json.dumps(entries, indent=1)
    seal = hashlib.blake2b(body.encode(), digest_size=16).hexdigest()
    (folder / MANIFEST).write_text(json.dumps({"files": entries, "blake2b": seal}, indent=1), encoding="utf-8")
    for path in [*files, folder / MANIFEST]:
        path.chmod(0o644)
        sync(path)
    sync(folder)


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


def _no_room(target: Path, n_needed: int, n_free: int) -> str:
    return f"{target}: the disk is too full: {n_needed:,} bytes are needed, {n_free:,} are free"


def _cannot_write(target: Path, n_needed: int, error: Exception) -> str:
    try:
        n_free = f"{shutil.disk_usage(target.parent).free:,}"
    except OSError:
        n_free = "an unknown number"
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{target}: cannot be written: {reason} ({n_needed:,} bytes are needed, {n_free} are free)"
