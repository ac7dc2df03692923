"""A step's numbers read while the next is under way: the same numbers, and a bad one stops every later update."""

import pytest
import torch

from qkv.choices import OptimizerKind
from qkv.errors import TrainingError
from qkv.training import open_run
from qkv.training.async_metrics import pin_batch
from tests.training.runs import checkpoints, curve, stopped_after, trainer_of


def late(prepared):
    """A trainer that reads as it does on a GPU."""
    trainer = trainer_of(prepared)
    trainer._reads_late = True
    return trainer


@pytest.mark.parametrize("optimizer", list(OptimizerKind))
def test_reading_late_changes_no_number_of_a_run_stopped_or_not(run, optimizer):
    plain, other = (run(name, optimizer=optimizer, ema_decay=0.9) for name in ("plain", "late"))
    trainer_of(plain).train()
    for n_steps in (5, 99):
        trainer = late(open_run(other.run.path))
        trainer.resume(pytest.fail)
        stopped_after(trainer, n_steps) if n_steps < 99 else trainer.train()
    assert curve(other.run.path) == curve(plain.run.path)
    assert checkpoints(other.run.path) == checkpoints(plain.run.path)


@pytest.mark.parametrize("optimizer", list(OptimizerKind))
@pytest.mark.parametrize("n_bad", [1, 99])
def test_a_gradient_that_is_no_number_is_named_and_nothing_is_updated_from_there_on(run, optimizer, n_bad):
    trainer = late(run(save_every=2, eval_every=99, optimizer=optimizer))
    plain, weights = trainer._gradients, {}

    def gradients(batch, step):
        if step == 3 and not weights:
            weights.update({name: p.detach().clone() for name, p in trainer.model.named_parameters()})
        is_bad = 3 <= step < 3 + n_bad
        hook = trainer.model.final_norm.weight.register_hook(lambda g: g * float("inf") if is_bad else g)
        made = plain(batch, step)
        hook.remove()
        return made

    trainer._gradients = gradients
    message = r"step 3: loss [\d.]+: the gradient of final_norm\.weight is not a finite number; no update was made"
    with pytest.raises(TrainingError, match=message):
        trainer.train()
    for name, p in trainer.model.named_parameters():
        assert torch.equal(p, weights[name])
    assert [line["step"] for line in curve(trainer.run.path)] == [1, 2, 3]
    assert trainer.run.checkpoint_steps()[-1] == 2


def test_pinning_takes_every_tensor_of_a_batch_and_changes_none(run, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: asked.append(tensor) or tensor.clone())
    prepared = run(cross_documents=False)
    batch = prepared.corpus.data(prepared.recipe.training).batch(0)
    held = pin_batch(batch)
    assert {id(t) for t in asked} == {id(t) for t in (batch.ids, batch.targets, batch.document_ids, batch.counts)}
    assert torch.equal(held.ids, batch.ids)
    assert torch.equal(held.document_ids, batch.document_ids)
