"""Where do weights lie that are read anew for every token? In pages of 2 MiB, where the system has them.

Memory comes in pages of 4 KiB, and where each of them lies has to be looked up: a CPU that reads hundreds of megabytes
a token does little else. Linux gives larger pages to those who ask; elsewhere, and for what is small, nothing changes.
"""

import ctypes
import math
import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

PAGE = 2**21
CAN_ASK = hasattr(mmap, "MADV_HUGEPAGE")
_COLLAPSE = 25
"""madvise: put what is there already into huge pages. Python has no name for it; Linux before 6.1 does not know it."""

Ranges = list[tuple[int, int]]


def new_zeros(like: Tensor, *shape: int) -> Tensor:
    """As `like.new_zeros(shape)`."""
    size = math.prod(shape)
    n_bytes = size * like.element_size()
    if n_bytes < PAGE or not CAN_ASK or like.device.type != "cpu":
        return like.new_zeros(shape)
    room = mmap.mmap(-1, -(-n_bytes // PAGE) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without them
        room.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(room, dtype=like.dtype, count=size).view(shape)


def contiguous(tensor: Tensor) -> Tensor:
    """As `tensor.contiguous()`, and always a copy where it is large."""
    if tensor.nbytes < PAGE or not CAN_ASK or tensor.device.type != "cpu":
        return tensor.contiguous()
    return new_zeros(tensor, *tensor.shape).copy_(tensor)


@contextmanager
def gathered() -> Iterator[None]:
    """What is taken from the system inside, by whomever, lies in huge pages afterwards; that takes 2 ms for a MiB.

    What this process had and freed before, and takes again, stays where it is.
    """
    before = _anonymous()
    yield
    if not before:
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, end in _without(_anonymous(), before):
        first, last = -(-start // PAGE) * PAGE, end // PAGE * PAGE
        if first < last:
            advise(first, last - first, _COLLAPSE)  # where that is refused, it stays where it is


def _anonymous() -> Ranges:
    """The addresses of this process's own memory; none where the system does not tell."""
    maps = Path("/proc/self/maps")
    if not CAN_ASK or not maps.exists():
        return []
    found: Ranges = []
    for line in maps.read_text(encoding="utf-8").splitlines():
        addresses, rights, _, _, inode, *name = line.split()
        if rights == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, end = addresses.split("-")
            found.append((int(start, 16), int(end, 16)))
    return found


def _without(ranges: Ranges, taken: Ranges) -> Ranges:
    """What of `ranges` is not in `taken`; both in order."""
    left: Ranges = []
    for start, end in ranges:
        here = start
        for first, last in taken:
            if last > here and first < end:
                left.append((here, first))
                here = last
        left.append((here, end))
    return [(start, end) for start, end in left if start < end]
