"""Tensors that several processes hold in pieces: whole again, cut anew, on disk and back.

What torch has for it takes a second to import, so it is imported where there are pieces.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from qkv.errors import DiskError, RunError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PIECES = "pieces"
"""The folder of a checkpoint that holds what every process wrote of its own."""


def is_cut(tensor: Tensor) -> "TypeGuard[DTensor]":
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """All of it, on every process: all must ask at once."""
    return tensor.full_tensor() if is_cut(tensor) else tensor


def own_piece(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_cut(tensor) else tensor


def cut_like(tensor: Tensor, other: Tensor) -> Tensor:
    """The whole tensor in the pieces in which another of its shape is held; nothing is sent for it."""
    if not is_cut(other) or is_cut(tensor) or tensor.shape != other.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements, src_data_rank=None)


def write_pieces(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Each process writes its own, as safetensors that say where each piece belongs; all must ask at once."""
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageWriter, save

    try:
        save(
            {name: tensor.detach() for name, tensor in tensors.items()},
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
        )
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise DiskError(f"{folder}: cannot be written: {reason}") from None


def read_pieces(folder: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What was written, by however many processes, cut as `like` is by this many; `like`: the model's parameters.

    A name is `kind/parameter` or `kind/parameter/what`, and its tensor has the parameter's shape.
    """
    from torch.distributed import is_initialized
    from torch.distributed.checkpoint import HuggingFaceStorageReader, TensorStorageMetadata, load

    reader = HuggingFaceStorageReader(str(folder))
    tensors: dict[str, Tensor] = {}
    for name, stored in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)  # a safetensors file holds nothing else
        parameter, size = like.get(name.split("/")[1]), tuple(stored.size)
        if parameter is None or parameter.shape != size:
            mine = "it is not there" if parameter is None else f"it is {tuple(parameter.shape)}"
            raise RunError(f"{folder}: holds {name} of {size}, in the model {mine}; was the recipe changed?")
        tensors[name] = torch.empty_like(parameter, requires_grad=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # which is meant
        load(tensors, storage_reader=reader, no_dist=not is_initialized())
    return tensors
