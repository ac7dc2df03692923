"""Encode trees that contain tensors as binary frames, and decode the frames with NumPy."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import isfinite
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from qkv.serving.frame_format import Blob, build_frame

SQRT_U8 = "√u8"
"""Data type of quantized weights. The byte b encodes (b / 255)², which gives small weights the finest resolution. The
error is at most 0.004."""
DTYPES = {"f32": np.dtype("<f4"), "i32": np.dtype("<i4"), SQRT_U8: np.dtype("u1")}


@dataclass(frozen=True)
class WeightsToQuantize:
    """Values between 0 and 1 that are each sent as one byte, with dtype √u8."""

    values: Float[Tensor, "..."]


def encode_frame(data: Any) -> bytes:  # noqa: ANN401 - any tree of dicts, lists, strings, numbers and tensors
    """Encode a tree as a frame, with each tensor as a blob and each non-finite float as null."""
    blobs: list[Blob] = []
    tree = _to_json_and_extract_blobs(data, "data", blobs)
    return build_frame(tree, blobs)


def decode_frame(frame: bytes) -> Any:  # noqa: ANN401
    """Decode a frame to a tree with a NumPy array for each blob. Blobs with dtype √u8 are decoded to float32."""
    data, arrays = split_frame(frame)
    return _insert_arrays(data, list(arrays.values()))


def split_frame(frame: bytes) -> tuple[Any, dict[str, np.ndarray]]:
    """Split a frame into the tree with its blob references and the blobs, keyed by index and name (`3_scores`)."""
    (n,) = struct.unpack_from("<I", frame)
    header = json.loads(frame[4 : 4 + n])
    arrays = {}
    for index, blob in enumerate(header["blobs"]):
        dtype, shape = DTYPES[blob["dtype"]], blob["shape"]
        array = np.frombuffer(frame, dtype, int(np.prod(shape)), 4 + n + blob["offset"]).reshape(shape)
        if blob["dtype"] == SQRT_U8:
            array = np.square(array.astype(np.float32) / 255)
        arrays[f"{index}_{blob['name']}"] = array
    return header["data"], arrays


def encode_json_nan_as_null(data: Any) -> bytes:  # noqa: ANN401
    """Encode a tree without tensors as JSON, with each non-finite float as null."""
    blobs: list[Blob] = []
    tree = _to_json_and_extract_blobs(data, "data", blobs)
    assert not blobs, "tensors need a frame"
    return json.dumps(tree, ensure_ascii=False, allow_nan=False).encode()


def _to_json_and_extract_blobs(value: Any, name: str, blobs: list[Blob]) -> Any:  # noqa: ANN401
    match value:
        case Tensor() | WeightsToQuantize():
            dtype, array = _encode_dtype_and_array(value)
            blobs.append(Blob(name=name, dtype=dtype, shape=array.shape, content=array.tobytes()))
            return {"blob": len(blobs) - 1}
        case Enum():
            return value.value
        case float():
            return value if isfinite(value) else None
        case Mapping():
            return {str(key): _to_json_and_extract_blobs(item, str(key), blobs) for key, item in value.items()}
        case list() | tuple():
            return [_to_json_and_extract_blobs(item, name, blobs) for item in value]
        case _:
            return value


def _encode_dtype_and_array(value: Tensor | WeightsToQuantize) -> tuple[str, np.ndarray]:
    if isinstance(value, WeightsToQuantize):
        half_steps = (value.values.detach().clamp(0, 1).sqrt() * (2 * 255)).cpu().numpy().astype(np.uint16)
        return SQRT_U8, _BYTE_OF_HALF_STEP.take(half_steps)
    kind = "f32" if value.is_floating_point() else "i32"
    return kind, value.detach().cpu().numpy().astype(DTYPES[kind], order="C")


def _build_compressible_byte_table() -> np.ndarray:
    """Build a table that maps each half step of the square root to a byte.

    Only every fourth byte is used below 62, and only every second byte below 126. Because most weights are in these
    ranges, the compressed response is a third shorter. The error of a small weight stays far below 0.004.
    """
    half_steps = np.arange(2 * 255 + 1) / 2 + 0.25
    step = np.select([half_steps < 62, half_steps < 126], [4, 2], 1)
    return (np.round(half_steps / step) * step).astype(np.uint8)


_BYTE_OF_HALF_STEP = _build_compressible_byte_table()


def _insert_arrays(value: Any, arrays: list[np.ndarray]) -> Any:  # noqa: ANN401
    match value:
        case {"blob": int(index)} if len(value) == 1:
            return arrays[index]
        case dict():
            return {key: _insert_arrays(item, arrays) for key, item in value.items()}
        case list():
            return [_insert_arrays(item, arrays) for item in value]
        case _:
            return value
