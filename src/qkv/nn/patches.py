"""Split images into patches and embed the patches as a source sequence."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv.errors import InputError, ShapeError
from qkv.tensors import Patches, Residual


class PatchProjection(nn.Module):
    """Linear embedding of image patches.

    A token embedding is the same matrix product with a one-hot vector in place of the patch.
    """

    def __init__(self, d_patch: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_patch, d_model).normal_())

    def forward(self, patches: Patches) -> Residual:
        return patches @ self.weight


def split_into_patches(images: Float[Tensor, "image row column channel"], patch_size: int) -> Patches:
    """Split images into square patches, row by row from the top left.

    The width `d_patch` of a patch is patch_size · patch_size · channels.
    """
    _, n_rows, n_columns, _ = images.shape
    if n_rows % patch_size or n_columns % patch_size:
        raise ShapeError(
            f"the height and width of images must be multiples of the patch size, "
            f"got images of {n_rows}×{n_columns} pixels and patches of {patch_size}×{patch_size}"
        )
    patches = images.unflatten(1, (-1, patch_size)).unflatten(3, (-1, patch_size))
    return patches.transpose(2, 3).flatten(3).flatten(1, 2)


def check_patches_shape_and_dtype(patches: Tensor, d_patch: int) -> None:
    """Raise an error if `patches` is not a non-empty float tensor of shape (batch, source, d_patch)."""
    if patches.ndim != 3 or patches.shape[2] != d_patch or patches.numel() == 0:
        shape = tuple(patches.shape)
        raise ShapeError(f"patches must have shape (batch, source, d_patch={d_patch}) and not be empty, got {shape}")
    if not patches.is_floating_point():
        raise InputError(f"patches must have a floating-point dtype, got {patches.dtype}")
