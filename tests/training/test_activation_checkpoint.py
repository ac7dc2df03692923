"""Tests for activation checkpointing: identical gradients, including dropout, with fewer saved tensors."""

import pytest
import torch

from qkv.config import GPTConfig
from qkv.models import GPT
from tests.training.runs import build_cpu_trainer, checkpoint_contents, logged_metrics

CONFIG = GPTConfig(vocab_size=19, context_length=13, n_layers=3, d_model=14, n_heads=2, dropout=0.3)


def gradients_and_saved_elements(*, checkpointed, documents=None):
    model = GPT(CONFIG, seed=1).train()
    if checkpointed:
        model.blocks.activation_checkpointing = True
    n_saved = 0

    def count(tensor):
        nonlocal n_saved
        n_saved += tensor.numel()
        return tensor

    torch.manual_seed(5)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        loss = model(torch.arange(26).reshape(2, 13) % 19, documents=documents).logsumexp(-1).sum()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}, n_saved


@pytest.mark.parametrize("documents", [None, torch.tensor([[0] * 6 + [1] * 7] * 2)])
def test_gradients_are_identical_and_fewer_tensors_are_saved(documents):
    loss, gradients, n_saved = gradients_and_saved_elements(checkpointed=False, documents=documents)
    checkpointed_loss, checkpointed_gradients, n_saved_checkpointed = gradients_and_saved_elements(
        checkpointed=True, documents=documents
    )
    assert torch.equal(loss, checkpointed_loss)
    assert gradients.keys() == checkpointed_gradients.keys()
    assert all(torch.equal(gradients[name], checkpointed_gradients[name]) for name in gradients)
    assert n_saved_checkpointed < n_saved / 4


def test_a_run_with_activation_checkpointing_is_identical(run, trained):
    checkpointed = run(activation_checkpointing=True)
    build_cpu_trainer(checkpointed).train()
    assert logged_metrics(checkpointed.run.path) == logged_metrics(trained.run.path)
    assert checkpoint_contents(checkpointed.run.path) == checkpoint_contents(trained.run.path)
