"""Store weights as int8 with one scale per row.

A matrix is stored as `NAME` (int8, from −127 to 127) and `NAME.scale` (float32, one scale per row). Multiplying each
row by its scale recovers the weights. Vectors are stored unchanged. The metadata of the safetensors file contains
`qkv_storage` = `int8-rows`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from qkv.errors import WeightsError

STORAGE_KEY = "qkv_storage"
INT8_ROWS = "int8-rows"
SCALE_SUFFIX = ".scale"
INT8_MAX = 127


def quantize_matrices_to_int8(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Quantize each matrix to int8 values and row scales. The error of each weight is at most half its row's scale."""
    quantized: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise WeightsError(f"{name}: contains non-finite weights, which cannot be stored as int8")
        if tensor.dim() < 2:
            quantized[name] = tensor.detach().float()
        else:
            quantized[name], quantized[name + SCALE_SUFFIX] = quantize_rows(tensor.detach().float())
    return quantized


def dequantize_int8_matrices(quantized: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert quantized tensors to float32. Quantizing them again yields exactly the same int8 values and scales."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in quantized.items():
        if name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in quantized:
            continue
        if tensor.dtype is not torch.int8:
            tensors[name] = tensor
            continue
        scale = quantized.get(name + SCALE_SUFFIX)
        if scale is None or scale.shape != tensor.shape[:1]:
            problem = "is missing" if scale is None else f"has shape {tuple(scale.shape)}"
            raise WeightsError(
                f"{name}: the int8 matrix has {tensor.shape[0]} rows, but {name}{SCALE_SUFFIX} {problem}"
            )
        tensors[name] = tensor.float() * _broadcast_rows(scale.float(), tensor)
    return tensors


def quantize_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the int8 values of a matrix and the scale of each row."""
    scale = _round_up_to_16_significant_bits(matrix.flatten(1).abs().amax(1) / INT8_MAX)
    divisor = torch.where(scale > 0, scale, 1.0)  # avoids dividing rows of zeros by 0
    values = (matrix / _broadcast_rows(divisor, matrix)).round().clamp(-INT8_MAX, INT8_MAX)
    return values.to(torch.int8), scale


def _round_up_to_16_significant_bits(scale: Tensor) -> Tensor:
    """Round each scale up to the next float32 whose last 8 bits are 0.

    The product of an int8 value and such a scale is exact and is therefore the same on every machine.
    """
    bits = scale.view(torch.int32)
    return ((bits + 0xFF) & ~0xFF).view(torch.float32)


def _broadcast_rows(scale: Tensor, matrix: Tensor) -> Tensor:
    return scale.view(-1, *[1] * (matrix.dim() - 1))
