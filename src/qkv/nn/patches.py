"""How does a picture become a sequence? Cut into squares; each square's numbers times a matrix are its vector."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv.errors import InputError, ShapeError
from qkv.tensors import Patches, Residual


class PatchEmbedding(nn.Module):
    """One vector a patch: numbers × matrix. A token's is the same product, of a one-hot and a table."""

    def __init__(self, d_patch: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_patch, d_model).normal_())

    def forward(self, patches: Patches) -> Residual:
        return patches @ self.weight


def cut_in_patches(pictures: Float[Tensor, "picture row column colour"], side: int) -> Patches:
    """Squares of side × side pixels, row by row from the top left; d_patch is side · side · colours."""
    _, n_rows, n_columns, _ = pictures.shape
    if n_rows % side or n_columns % side:
        raise ShapeError(f"pictures of {n_rows}×{n_columns} pixels cannot be cut into patches of {side}×{side}")
    parts = pictures.unflatten(1, (-1, side)).unflatten(3, (-1, side))
    return parts.transpose(2, 3).flatten(3).flatten(1, 2)


def check_patches(patches: Tensor, d_patch: int) -> None:
    """Refuse what is no batch of patches of that width, such as ids."""
    if patches.ndim != 3 or patches.shape[2] != d_patch or patches.numel() == 0:
        shape = tuple(patches.shape)
        raise ShapeError(
            f"the source has shape {shape}; patches are (batch, source, d_patch={d_patch}), none of them 0"
        )
    if not patches.is_floating_point():
        raise InputError(f"patches are {patches.dtype}, they must be floating-point numbers")
