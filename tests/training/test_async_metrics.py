"""Tests for asynchronous step metrics."""

import pytest
import torch

from qkv.choices import OptimizerKind
from qkv.errors import TrainingError
from qkv.training import open_run
from qkv.training.async_metrics import pin_batch
from tests.training.runs import build_cpu_trainer, checkpoint_contents, logged_metrics, train_until_signal


def async_trainer(prepared):
    """Build a trainer that reads metrics asynchronously, as on a GPU."""
    trainer = build_cpu_trainer(prepared)
    trainer._async_metrics = True
    return trainer


@pytest.mark.parametrize("optimizer", list(OptimizerKind))
def test_async_metrics_do_not_change_a_run_or_a_resumed_run(run, optimizer):
    sync, other = (run(name, optimizer=optimizer, ema_decay=0.9) for name in ("sync", "async"))
    build_cpu_trainer(sync).train()
    for n_steps in (5, 99):
        trainer = async_trainer(open_run(other.run.path))
        trainer.resume(pytest.fail)
        train_until_signal(trainer, n_steps) if n_steps < 99 else trainer.train()
    assert logged_metrics(other.run.path) == logged_metrics(sync.run.path)
    assert checkpoint_contents(other.run.path) == checkpoint_contents(sync.run.path)


@pytest.mark.parametrize("optimizer", list(OptimizerKind))
@pytest.mark.parametrize("n_bad", [1, 99])
def test_a_non_finite_gradient_is_named_and_all_later_updates_are_skipped(run, optimizer, n_bad):
    trainer = async_trainer(run(save_every=2, eval_every=99, optimizer=optimizer))
    original, weights = trainer._compute_gradients, {}

    def gradients_with_inf(batch, step):
        if step == 3 and not weights:
            weights.update({name: p.detach().clone() for name, p in trainer.model.named_parameters()})
        is_bad = 3 <= step < 3 + n_bad
        hook = trainer.model.final_norm.weight.register_hook(lambda g: g * float("inf") if is_bad else g)
        pending = original(batch, step)
        hook.remove()
        return pending

    trainer._compute_gradients = gradients_with_inf
    with pytest.raises(TrainingError, match=r"step 3: loss [\d.]+: .*final_norm\.weight"):
        trainer.train()
    for name, p in trainer.model.named_parameters():
        assert torch.equal(p, weights[name])
    assert [line["step"] for line in logged_metrics(trainer.run.path)] == [1, 2, 3]
    assert trainer.run.checkpoint_steps()[-1] == 2


def test_pin_batch_pins_every_tensor(run, monkeypatch):
    pinned_tensors = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned_tensors.append(tensor) or tensor.clone())
    prepared = run(cross_documents=False)
    batch = prepared.corpus.data(prepared.recipe.training).batch(0)
    pinned = pin_batch(batch)
    assert {id(t) for t in pinned_tensors} == {
        id(t) for t in (batch.ids, batch.targets, batch.document_ids, batch.counts)
    }
    assert torch.equal(pinned.ids, batch.ids)
    assert torch.equal(pinned.document_ids, batch.document_ids)
