"""How do numbers travel? Tensors as blobs of one frame, everything else as its JSON."""

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

from qkv.serving.frame_format import Blob, frame_of

ROOT_U8 = "√u8"
"""A byte b stands for (b / 255)², so that small weights are told apart best; none is wrong by more than 0.004."""
DTYPES = {"f32": np.dtype("<f4"), "i32": np.dtype("<i4"), ROOT_U8: np.dtype("u1")}


@dataclass(frozen=True)
class Shares:
    """Numbers from 0 to 1 that a byte each is enough for."""

    values: Float[Tensor, "..."]


def pack(data: Any) -> bytes:  # noqa: ANN401 - any tree of dicts, lists, words, numbers and tensors
    """Tensors become blobs, whose number stands in their place; what is no finite number becomes null."""
    blobs: list[Blob] = []
    tree = _tree(data, "data", blobs)
    return frame_of(tree, blobs)


def unpack(frame: bytes) -> Any:  # noqa: ANN401
    """The data, with NumPy arrays for blobs; √u8 as float32 weights."""
    data, arrays = unpack_parts(frame)
    return _filled(data, list(arrays.values()))


def unpack_parts(frame: bytes) -> tuple[Any, dict[str, np.ndarray]]:
    """The data as sent, and the blobs by number and name: `3_scores`."""
    (n,) = struct.unpack_from("<I", frame)
    header = json.loads(frame[4 : 4 + n])
    arrays = {}
    for number, blob in enumerate(header["blobs"]):
        dtype, shape = DTYPES[blob["dtype"]], blob["shape"]
        array = np.frombuffer(frame, dtype, int(np.prod(shape)), 4 + n + blob["offset"]).reshape(shape)
        if blob["dtype"] == ROOT_U8:
            array = np.square(array.astype(np.float32) / 255)
        arrays[f"{number}_{blob['name']}"] = array
    return header["data"], arrays


def as_json(data: Any) -> bytes:  # noqa: ANN401
    """The same tree without blobs."""
    blobs: list[Blob] = []
    tree = _tree(data, "data", blobs)
    assert not blobs, "tensors need a frame"
    return json.dumps(tree, ensure_ascii=False, allow_nan=False).encode()


def _tree(value: Any, name: str, blobs: list[Blob]) -> Any:  # noqa: ANN401
    match value:
        case Tensor() | Shares():
            dtype, array = _array(value)
            blobs.append(Blob(name=name, dtype=dtype, shape=array.shape, content=array.tobytes()))
            return {"blob": len(blobs) - 1}
        case Enum():
            return value.value
        case float():
            return value if isfinite(value) else None
        case Mapping():
            return {str(key): _tree(one, str(key), blobs) for key, one in value.items()}
        case list() | tuple():
            return [_tree(one, name, blobs) for one in value]
        case _:
            return value


def _array(value: Tensor | Shares) -> tuple[str, np.ndarray]:
    if isinstance(value, Shares):
        halves = (value.values.detach().clamp(0, 1).sqrt() * (2 * 255)).cpu().numpy().astype(np.uint16)
        return ROOT_U8, _BYTES.take(halves)
    kind = "f32" if value.is_floating_point() else "i32"
    return kind, value.detach().cpu().numpy().astype(DTYPES[kind], order="C")


def _bytes() -> np.ndarray:
    """The byte for each half step of the root.

    One step moves a small weight by far less than 0.004. Of the small bytes, which most weights have, each fourth is
    enough, and what travels is a third shorter.
    """
    halves = np.arange(2 * 255 + 1) / 2 + 0.25
    step = np.select([halves < 62, halves < 126], [4, 2], 1)
    return (np.round(halves / step) * step).astype(np.uint8)


_BYTES = _bytes()


def _filled(value: Any, arrays: list[np.ndarray]) -> Any:  # noqa: ANN401
    match value:
        case {"blob": int(number)} if len(value) == 1:
            return arrays[number]
        case dict():
            return {key: _filled(one, arrays) for key, one in value.items()}
        case list():
            return [_filled(one, arrays) for one in value]
        case _:
            return value
