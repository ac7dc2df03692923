"""Files that are whole or not there, and what is said when the disk refuses."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qkv.errors import DiskError, InputError


@contextmanager
def convert_disk_errors(path: Path, n_bytes: int) -> Iterator[None]:
    """Turns the system's refusal into a line with the path, the bytes needed and the bytes free."""
    try:
        yield
    except OSError as error:
        existing = next((parent for parent in (path, *path.parents) if parent.exists()), Path("/"))
        free = shutil.disk_usage(existing).free
        problem = f"cannot write {n_bytes} bytes" if n_bytes else "cannot be written"
        raise DiskError(f"{path}: {problem}: {error.strerror or error} ({free} bytes free)") from None


def write_atomically(path: Path, data: bytes) -> None:
    """Written aside, synced, renamed: a reader sees the old file or the new one, never half."""
    with convert_disk_errors(path, len(data)):
        temporary = partial_path(path)
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
        fsync_path(path.parent)


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON object, or an error that names the file."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds a {type(content).__name__}, not an object")
    return content


def partial_path(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def fsync_path(folder: Path) -> None:
    """A rename outlives a power cut only when the folder itself is synced."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
