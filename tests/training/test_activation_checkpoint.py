"""Recomputed blocks: the same gradients, dropout too, from fewer kept tensors."""

import pytest
import torch

from qkv.config import GPTConfig
from qkv.models import GPT
from qkv.training.activation_checkpoint import enable_activation_checkpointing
from tests.training.runs import checkpoints, curve, trainer_of

CONFIG = GPTConfig(vocab_size=19, context_length=13, n_layers=3, d_model=14, n_heads=2, dropout=0.3)


def gradients_and_kept(*, recomputed, documents=None):
    model = GPT(CONFIG, seed=1).train()
    if recomputed:
        enable_activation_checkpointing(model)
    kept = 0

    def keep(tensor):
        nonlocal kept
        kept += tensor.numel()
        return tensor

    torch.manual_seed(5)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(torch.arange(26).reshape(2, 13) % 19, documents=documents).logsumexp(-1).sum()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}, kept


@pytest.mark.parametrize("documents", [None, torch.tensor([[0] * 6 + [1] * 7] * 2)])
def test_the_gradients_are_the_same_and_fewer_tensors_are_kept(documents):
    loss, gradients, kept = gradients_and_kept(recomputed=False, documents=documents)
    again, others, kept_less = gradients_and_kept(recomputed=True, documents=documents)
    assert torch.equal(loss, again)
    assert gradients.keys() == others.keys()
    assert all(torch.equal(gradients[name], others[name]) for name in gradients)
    assert kept_less < kept / 4


def test_the_names_of_the_weights_stay():
    model = GPT(CONFIG)
    before = list(model.state_dict())
    enable_activation_checkpointing(model)
    assert list(model.state_dict()) == before


def test_a_whole_run_is_the_same(run, trained):
    recomputed = run(activation_checkpointing=True)
    trainer_of(recomputed).train()
    assert curve(recomputed.run.path) == curve(trained.run.path)
    assert checkpoints(recomputed.run.path) == checkpoints(trained.run.path)
