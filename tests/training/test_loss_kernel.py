"""The loss kernel, run by Triton's interpreter: losses and errors are those of the formula."""

import pytest
import torch
from torch.nn import functional as F

from qkv.tensors import IGNORE_INDEX
from tests.by_triton import BY_TRITON

pytestmark = BY_TRITON


@pytest.mark.parametrize("n_words", [37, 64, 101])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_and_errors_are_those_of_the_formula(n_words, smoothing, monkeypatch):
    from qkv.training import loss_kernel

    monkeypatch.setattr(loss_kernel, "BLOCK", 32)
    generator = torch.Generator().manual_seed(3)
    logits = 5 * torch.randn(11, 128, generator=generator)
    targets = torch.randint(0, n_words, (11,), generator=generator)
    targets[4] = IGNORE_INDEX
    words = logits[:, :n_words].clone().requires_grad_()
    wanted = F.cross_entropy(words, targets, ignore_index=IGNORE_INDEX, reduction="none", label_smoothing=smoothing)
    wanted.sum().backward()

    alone = logits.clone()
    found = loss_kernel.cross_entropy_inplace(alone, targets, n_words, smoothing, wants_errors=False)
    torch.testing.assert_close(found, wanted.detach())
    assert torch.equal(alone, logits)

    found = loss_kernel.cross_entropy_inplace(logits, targets, n_words, smoothing, wants_errors=True)
    torch.testing.assert_close(found, wanted.detach())
    torch.testing.assert_close(logits[:, :n_words], words.grad)
    assert not logits[:, n_words:].any()
