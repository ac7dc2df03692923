"""Memory in huge pages: the same numbers, and, where the system has such pages, really in them."""

import mmap
from pathlib import Path

import pytest
import torch

from qkv.nn import huge_pages
from qkv.nn.huge_pages import PAGE, contiguous, new_zeros

ROLLUP = Path("/proc/self/smaps_rollup")


def n_huge() -> int:
    """Bytes of this process in huge pages."""
    lines = ROLLUP.read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))


def has_pages() -> bool:
    """Whether this system, as it is now, gives huge pages to one who asks."""
    if not huge_pages.CAN_ASK or not ROLLUP.exists():
        return False
    before, room = n_huge(), mmap.mmap(-1, 8 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        room.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return False
    room.write(b"1" * len(room))
    return n_huge() - before >= 4 * PAGE


@pytest.mark.parametrize("width", [3, 1_000_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_zeros_are_torchs_zeros(width, dtype):
    made = new_zeros(torch.ones(2, dtype=dtype), 7, width)
    assert made.dtype is dtype
    assert torch.equal(made, torch.zeros(7, width, dtype=dtype))
    made += 1
    assert made.sum(dtype=torch.long) == 7 * width, "it can be written to"


@pytest.mark.parametrize("shape", [(2, 3, 5), (7, 601, 331)])
def test_what_lies_otherwise_is_laid_out_in_order(shape):
    turned = torch.randn(shape).transpose(1, 2)
    laid = contiguous(turned)
    assert laid.is_contiguous()
    assert torch.equal(laid, turned)


def test_where_nobody_can_ask_all_is_as_usual(monkeypatch):
    monkeypatch.setattr(huge_pages, "CAN_ASK", False)
    turned = torch.randn(701, 997).T
    assert torch.equal(contiguous(turned), turned)
    assert new_zeros(turned, 701, 997).shape == (701, 997)


@pytest.mark.skipif(not has_pages(), reason="this system gives no huge pages")
def test_large_weights_lie_in_huge_pages():
    before = n_huge()
    kept = new_zeros(torch.ones(1), 8 * PAGE // 4)
    kept += 1
    assert n_huge() - before >= 4 * PAGE
    del kept
    assert n_huge() - before < 4 * PAGE, "and are given back"
