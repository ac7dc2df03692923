"""The attention kernel for short texts equals attention within each text, on a GPU or in Triton's interpreter."""

import pytest
import torch
from torch.nn import functional as F


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("longest", "n_heads"), [(5, 1), (13, 3), (128, 3)])
def test_each_text_attends_only_to_itself(kernel_device, dtype, longest, n_heads, monkeypatch, assert_agree):
    from qkv.accel.cuda import varlen_kernel

    monkeypatch.setattr(varlen_kernel, "QUERIES", 16)
    lengths = [longest, 1, 0, min(17, longest), 3, 0, 0]
    generator = torch.Generator().manual_seed(longest)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    # Views of one tensor, as a fused QKV projection produces them.
    fused_qkv = torch.randn(sum(lengths), 3 * n_heads * 16, generator=generator).to(kernel_device, dtype)
    queries, keys, values = (part.unflatten(1, (n_heads, 16)) for part in fused_qkv.chunk(3, dim=1))
    actual = varlen_kernel.short_varlen_attention(queries, keys, values, starts.to(kernel_device), longest)
    assert actual.shape == queries.shape
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        if end > start:
            text_qkv = (part[start:end].transpose(0, 1).float() for part in (queries, keys, values))
            expected = F.scaled_dot_product_attention(*text_qkv).transpose(0, 1).to(dtype)
            assert_agree(actual[start:end], expected)
