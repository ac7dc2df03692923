"""Gather, shard, save and load sharded tensors (FSDP).

`torch.distributed.tensor` and `torch.distributed.checkpoint` take about a second to import, so they are imported only
when sharded tensors are used.
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

SHARDS_FOLDER = "shards"
"""Subfolder of a checkpoint to which every process writes its shards."""


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    # The exact type check avoids the slow import for ordinary tensors.
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather the full tensor on every rank. This is a collective operation for sharded tensors."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def shard_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Shard a full tensor in the same way as `other`.

    Every rank slices its own copy, so nothing is communicated. The tensor is returned unchanged if `other` is not
    sharded, `tensor` is already sharded, or their shapes differ.
    """
    if not is_sharded(other) or is_sharded(tensor) or tensor.shape != other.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements, src_data_rank=None)


def save_sharded_safetensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Save sharded tensors as safetensors files.

    This is a collective operation in which every rank writes its own shards.
    """
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageWriter, save

    try:
        save(
            {name: tensor.detach() for name, tensor in tensors.items()},
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
        )
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise DiskError(f"{folder}: cannot write: {reason}") from None


def load_sharded(folder: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Load tensors written by `save_sharded_safetensors`, sharded to match the model parameters in `like`.

    The number of ranks may have changed since the tensors were saved. Tensor names have the form `kind/parameter` or
    `kind/parameter/state`, and each tensor has the shape of its parameter.
    """
    from torch.distributed import is_initialized
    from torch.distributed.checkpoint import HuggingFaceStorageReader, TensorStorageMetadata, load

    reader = HuggingFaceStorageReader(str(folder))
    tensors: dict[str, Tensor] = {}
    for name, stored in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)  # a safetensors file contains nothing else
        parameter, size = like.get(name.split("/")[1]), tuple(stored.size)
        if parameter is None or parameter.shape != size:
            expected = (
                "does not exist in the model"
                if parameter is None
                else f"has shape {tuple(parameter.shape)} in the model"
            )
            raise RunError(
                f"{folder}: {name} has shape {size} in the checkpoint, but {expected}; was the recipe changed?"
            )
        tensors[name] = torch.empty_like(parameter, requires_grad=False)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled"
        )  # intended: without torchrun, a single process loads all shards
        load(tensors, storage_reader=reader, no_dist=not is_initialized())
    return tensors
