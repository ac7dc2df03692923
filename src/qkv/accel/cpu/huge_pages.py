"""Allocate weights in 2 MiB memory pages.

Memory is usually mapped in pages of 4 KiB. A CPU that reads hundreds of megabytes of weights per token spends most of
its time on address translation. Linux provides larger pages on request. On other systems, and for small tensors, a
normal contiguous tensor is returned.
"""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2**21
HAS_MADVISE_HUGEPAGE = hasattr(mmap, "MADV_HUGEPAGE")


def contiguous_in_huge_pages(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor like `tensor.contiguous()`, but copy large CPU tensors into huge pages."""
    if tensor.nbytes < HUGE_PAGE_BYTES or not HAS_MADVISE_HUGEPAGE or tensor.device.type != "cpu":
        return tensor.contiguous()
    n_bytes = -(-tensor.nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    buffer = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # the kernel may be built without huge pages
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(buffer, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape).copy_(tensor)
