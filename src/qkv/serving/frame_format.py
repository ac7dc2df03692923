"""How do bytes lie in a frame? A JSON header, then blobs, each where a typed array can lie on it.

Without torch: the process that speaks HTTP does without.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ALIGNED = 8


@dataclass(frozen=True, kw_only=True)
class Blob:
    name: str
    dtype: str
    shape: Sequence[int]
    content: bytes


def frame_of(tree: Any, blobs: Sequence[Blob] = ()) -> bytes:  # noqa: ANN401 - any tree that JSON takes
    """`{"blob": 3}` in the tree stands for the blob of that number."""
    listed, offset = [], 0
    for one in blobs:
        listed.append({"name": one.name, "dtype": one.dtype, "shape": list(one.shape), "offset": offset})
        offset += _padded(len(one.content))
    header = json.dumps({"data": tree, "blobs": listed}, ensure_ascii=False, allow_nan=False).encode()
    header += b" " * (_padded(4 + len(header)) - 4 - len(header))
    parts = [struct.pack("<I", len(header)), header]
    for one in blobs:
        parts += [one.content, bytes(_padded(len(one.content)) - len(one.content))]
    return b"".join(parts)


def counted(frame: bytes) -> bytes:
    """After its length, as the frames of a stream come."""
    return struct.pack("<I", len(frame)) + frame


def _padded(n: int) -> int:
    return -(-n // ALIGNED) * ALIGNED
