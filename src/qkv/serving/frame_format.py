"""Binary frame format, which consists of a JSON header followed by aligned blobs.

This module does not import torch because the HTTP process runs without it.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BLOB_ALIGNMENT = 8
"""Alignment of blobs in bytes, which allows the page to create typed arrays without copying."""


@dataclass(frozen=True, kw_only=True)
class Blob:
    """A named array, stored as raw bytes."""

    name: str
    dtype: str
    shape: Sequence[int]
    content: bytes


def build_frame(tree: Any, blobs: Sequence[Blob] = ()) -> bytes:  # noqa: ANN401 - any tree that JSON can represent
    """Encode a JSON tree and its blobs as a frame. In the tree, `{"blob": 3}` refers to `blobs[3]`."""
    entries, offset = [], 0
    for blob in blobs:
        entries.append({"name": blob.name, "dtype": blob.dtype, "shape": list(blob.shape), "offset": offset})
        offset += _pad_to_alignment(len(blob.content))
    header = json.dumps({"data": tree, "blobs": entries}, ensure_ascii=False, allow_nan=False).encode()
    # The first 4 bytes contain the header length. The header is padded with spaces, which are valid in JSON.
    header += b" " * (_pad_to_alignment(4 + len(header)) - 4 - len(header))
    parts = [struct.pack("<I", len(header)), header]
    for blob in blobs:
        parts += [blob.content, bytes(_pad_to_alignment(len(blob.content)) - len(blob.content))]
    return b"".join(parts)


def add_length_prefix(frame: bytes) -> bytes:
    """Prepend the frame's length as a little-endian uint32, as the frames of a stream require."""
    return struct.pack("<I", len(frame)) + frame


def _pad_to_alignment(n: int) -> int:
    return -(-n // BLOB_ALIGNMENT) * BLOB_ALIGNMENT
