"""Images as sequences of patches, which an encoder reads like tokens."""

from jaxtyping import Float
from torch import Tensor

from qkv.errors import ShapeError
from qkv.tensors import Patches


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
