"""The Triton loss kernel equals cross-entropy, on a GPU or in Triton's interpreter."""

import pytest
import torch
from torch.nn import functional as F

from qkv.tensors import IGNORE_INDEX


@pytest.mark.parametrize("vocab_size", [37, 64, 101])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_and_gradients_match_cross_entropy(kernel_device, vocab_size, smoothing, monkeypatch):
    from qkv.accel.cuda import loss_kernel

    monkeypatch.setattr(loss_kernel, "BLOCK", 32)
    generator = torch.Generator().manual_seed(3)
    logits = (5 * torch.randn(11, 128, generator=generator)).to(kernel_device)
    targets = torch.randint(0, vocab_size, (11,), generator=generator)
    targets[4] = IGNORE_INDEX
    targets = targets.to(kernel_device)
    valid_logits = logits[:, :vocab_size].clone().requires_grad_()
    expected = F.cross_entropy(
        valid_logits, targets, ignore_index=IGNORE_INDEX, reduction="none", label_smoothing=smoothing
    )
    expected.sum().backward()

    unchanged = logits.clone()
    losses = loss_kernel.cross_entropy_per_row_inplace(
        unchanged, targets, vocab_size, smoothing, compute_gradient=False
    )
    torch.testing.assert_close(losses, expected.detach())
    assert torch.equal(unchanged, logits)

    losses = loss_kernel.cross_entropy_per_row_inplace(logits, targets, vocab_size, smoothing, compute_gradient=True)
    torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(logits[:, :vocab_size], valid_logits.grad)
    assert not logits[:, vocab_size:].any()
