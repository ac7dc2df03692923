"""Tests of tensors in huge pages: same values, and really in huge pages if the system supports them."""

import mmap
from pathlib import Path

import pytest
import torch

from qkv.accel.cpu import huge_pages
from qkv.accel.cpu.huge_pages import HUGE_PAGE_BYTES, contiguous_in_huge_pages

ROLLUP = Path("/proc/self/smaps_rollup")


def huge_page_bytes() -> int:
    """Returns the bytes of this process that are in huge pages."""
    lines = ROLLUP.read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))


def supports_huge_pages() -> bool:
    """Whether this system currently provides huge pages on request."""
    if not huge_pages.HAS_MADVISE_HUGEPAGE or not ROLLUP.exists():
        return False
    before, buffer = huge_page_bytes(), mmap.mmap(-1, 8 * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        buffer.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return False
    buffer.write(b"1" * len(buffer))
    return huge_page_bytes() - before >= 4 * HUGE_PAGE_BYTES


@pytest.mark.parametrize("shape", [(2, 3, 5), (7, 601, 331)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_transposed_tensor_becomes_contiguous(shape, dtype):
    turned = torch.randn(shape, dtype=dtype).transpose(1, 2)
    contiguous = contiguous_in_huge_pages(turned)
    assert contiguous.is_contiguous()
    assert contiguous.dtype is dtype
    assert torch.equal(contiguous, turned)
    contiguous += 1
    assert torch.equal(contiguous, turned + 1), "it can be written to"


def test_without_madvise_the_tensor_is_contiguous(monkeypatch):
    monkeypatch.setattr(huge_pages, "HAS_MADVISE_HUGEPAGE", False)
    monkeypatch.delattr(mmap, "mmap")
    turned = torch.randn(701, 997).T
    assert torch.equal(contiguous_in_huge_pages(turned), turned)


@pytest.mark.skipif(not supports_huge_pages(), reason="this system gives no huge pages")
def test_large_weights_are_allocated_in_huge_pages():
    before = huge_page_bytes()
    weight = contiguous_in_huge_pages(torch.ones(HUGE_PAGE_BYTES, 2).T)  # 4 huge pages
    assert huge_page_bytes() - before >= 3 * HUGE_PAGE_BYTES
    del weight
    assert huge_page_bytes() - before < 3 * HUGE_PAGE_BYTES, "and are given back"
