"""How are weights stored in one byte each, and computed with?

Each row of a matrix has its own scale: value = whole number from −127 to 127, times the row's scale. In the file
a matrix NAME is `NAME` (int8) and `NAME.scale` (float32, one a row); vectors stay as they are. The file's
metadata says so: `qkv_storage` = `int8-rows`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from qkv.errors import InputError, WeightsError
from qkv.models import Model, RNNSeq2Seq
from qkv.nn import Int8Linear, Unembedding

STORAGE_KEY = "qkv_storage"
INT8_ROWS = "int8-rows"
SCALE = ".scale"
LARGEST = 127


def to_int8(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every matrix as whole numbers and scales. The error of a weight is at most half its row's scale."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise WeightsError(f"{name}: has a weight that is no finite number; it cannot be stored as int8")
        if tensor.dim() < 2:
            stored[name] = tensor.detach().float()
        else:
            stored[name], stored[name + SCALE] = _rows_to_int8(tensor.detach().float())
    return stored


def from_int8(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The way back, in float32. Storing the result again gives the same bytes."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith(SCALE) and name.removesuffix(SCALE) in stored:
            continue
        if tensor.dtype is not torch.int8:
            tensors[name] = tensor
            continue
        scale = stored.get(name + SCALE)
        if scale is None or scale.shape != tensor.shape[:1]:
            got = "is missing" if scale is None else f"has shape {tuple(scale.shape)}"
            raise WeightsError(f"{name}: is int8 with {tensor.shape[0]} rows, but {name}{SCALE} {got}")
        tensors[name] = tensor.float() * _along_rows(scale.float(), tensor)
    return tensors


def in_int8(model: Model) -> None:
    """From now on the model multiplies in whole numbers; its token table, norms and biases stay as they are.

    Weights that were stored in int8 become the very numbers that were stored.
    """
    if isinstance(model, RNNSeq2Seq):
        raise InputError("int8 arithmetic is for Transformers; this model is an RNN")
    parts = [(part, name, one) for part in model.modules() for name, one in part.named_children()]
    for part, name, one in parts:
        if type(one) is nn.Linear:
            setattr(part, name, _linear_in_int8(one))
        elif isinstance(one, Unembedding):
            one.int8 = _linear_in_int8(one)


def _linear_in_int8(linear: nn.Linear | Unembedding) -> Int8Linear:
    return Int8Linear(*_rows_to_int8(linear.weight.detach().float()), linear.bias)


def _rows_to_int8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    scale = _sixteen_bits_up(matrix.flatten(1).abs().amax(1) / LARGEST)
    safe = torch.where(scale > 0, scale, 1.0)  # a row of zeros
    whole = (matrix / _along_rows(safe, matrix)).round().clamp(-LARGEST, LARGEST)
    return whole.to(torch.int8), scale


def _sixteen_bits_up(scale: Tensor) -> Tensor:
    """The next float32 whose last 8 bits are 0: then whole number × scale is exact, on every machine the same."""
    bits = scale.view(torch.int32)
    return ((bits + 0xFF) & ~0xFF).view(torch.float32)


def _along_rows(scale: Tensor, matrix: Tensor) -> Tensor:
    return scale.view(-1, *[1] * (matrix.dim() - 1))
