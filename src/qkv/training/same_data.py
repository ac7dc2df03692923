"""Are a run's data what they were when it began?"""

import json
from hashlib import blake2b
from pathlib import Path

from qkv.data.disk import read_object, write_whole
from qkv.errors import RunError

RECORD = "data.json"
WHOLE = 64 << 20
"""Bytes. Of a larger file only both ends are hashed: half this many at its beginning, half at its end."""


def note_data(run: Path, data: Path) -> None:
    """Write down every file's size and hash, by its path in the run."""
    files = sorted(path for path in data.rglob("*") if path.is_file())
    noted = {str(path.relative_to(run)): _fingerprint(path) for path in files}
    write_whole(run / RECORD, json.dumps(noted, indent=1).encode())


def check_data(run: Path) -> None:
    """Refuse to go on with other data: the numbers would be of neither. A run of an older version has no record."""
    if not (run / RECORD).is_file():
        return
    for name, noted in read_object(run / RECORD).items():
        path = run / name
        found = _fingerprint(path) if path.is_file() else "not there"
        if found != noted:
            raise RunError(f"{path}: is {found}; when the run began it was {noted}")


def _fingerprint(path: Path) -> str:
    size = path.stat().st_size
    hashed = blake2b(digest_size=8)
    with path.open("rb") as stream:
        hashed.update(stream.read(WHOLE if size <= WHOLE else WHOLE // 2))
        stream.seek(max(stream.tell(), size - WHOLE // 2))
        hashed.update(stream.read())
    return f"{size:,} bytes, hash {hashed.hexdigest()}"
