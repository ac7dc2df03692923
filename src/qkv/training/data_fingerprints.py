"""Fingerprints of the training data, used to detect changes before a run is resumed."""

import json
from hashlib import blake2b
from pathlib import Path

from qkv.data.file_io import read_json_object, write_atomically
from qkv.errors import RunError

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
