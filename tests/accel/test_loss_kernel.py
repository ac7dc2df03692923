"""The Triton loss kernel equals cross-entropy, on a GPU or in Triton's interpreter."""

import pytest
import torch
from torch.nn import functional as F

from qkv.accel.cuda.fused_autograd import fused_loss_sum
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


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize(("has_bias", "smoothing"), [(False, 0.0), (True, 0.1)])
def test_the_loss_of_an_unembedding_and_its_gradients_match_cross_entropy(
    kernel_device, chunk, has_bias, smoothing, assert_agree
):
    generator = torch.Generator().manual_seed(5)
    shapes = [(11, 24), (37, 24), *([(37,)] if has_bias else [])]
    inputs = [torch.randn(shape, generator=generator).to(kernel_device).requires_grad_() for shape in shapes]
    targets = torch.randint(0, 37, (11,), generator=generator)
    targets[4] = IGNORE_INDEX
    targets = targets.to(kernel_device)
    bias = inputs[2] if has_bias else None
    expected = F.cross_entropy(
        F.linear(inputs[0], inputs[1], bias), targets, ignore_index=IGNORE_INDEX, reduction="sum",
        label_smoothing=smoothing,
    )  # fmt: skip
    actual = fused_loss_sum(inputs[0], inputs[1], bias, targets, chunk=chunk, smoothing=smoothing)
    assert_agree(actual.detach(), expected.detach())
    for gradient, eager_gradient in zip(
        torch.autograd.grad(2 * actual, inputs), torch.autograd.grad(2 * expected, inputs), strict=True
    ):
        assert_agree(gradient, eager_gradient)
