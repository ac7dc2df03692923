"""Write files atomically and report file errors with helpful messages."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qkv.errors import DiskError, InputError


@contextmanager
def convert_os_errors_to_disk_error(path: Path, bytes_to_write: int) -> Iterator[None]:
    """Convert any `OSError` to a `DiskError` with the path, the number of bytes to write and the bytes available."""
    try:
        yield
    except OSError as error:
        existing = next((parent for parent in (path, *path.parents) if parent.exists()), Path("/"))
        free = shutil.disk_usage(existing).free
        problem = f"cannot write {bytes_to_write} bytes" if bytes_to_write else "cannot write"
        raise DiskError(f"{path}: {problem}: {error.strerror or error} ({free} bytes free)") from None


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file atomically so that readers never see a partially written file.

    The data is written to a temporary file, which is flushed to disk and then renamed.
    """
    with convert_os_errors_to_disk_error(path, len(data)):
        temporary = partial_path(path)
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
        fsync_path(path.parent)


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. If reading fails, an `InputError` with the file name is raised."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: invalid JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def partial_path(path: Path) -> Path:
    """Return the path of the temporary file that will replace `path`."""
    return path.with_name(path.name + ".partial")


def fsync_path(path: Path) -> None:
    """Flush a file or folder to disk. To survive a power failure, a rename requires flushing the folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
