"""Where do weights lie that are read anew for every token? In pages of 2 MiB, where the system has them.

Memory comes in pages of 4 KiB, and where each of them lies has to be looked up: a CPU that reads hundreds of megabytes
a token does little else. Linux gives larger pages to those who ask; elsewhere, and for what is small, nothing changes.
"""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

PAGE = 2**21
CAN_ASK = hasattr(mmap, "MADV_HUGEPAGE")


def contiguous(tensor: Tensor) -> Tensor:
    """As `tensor.contiguous()`; always a copy where it is large."""
    if tensor.nbytes < PAGE or not CAN_ASK or tensor.device.type != "cpu":
        return tensor.contiguous()
    room = mmap.mmap(-1, -(-tensor.nbytes // PAGE) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without them
        room.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(room, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape).copy_(tensor)
