"""Tests for the training loop: gradient accumulation, resuming, non-finite values and stopping."""

import json
import os
import re
import signal
from dataclasses import replace

import pytest
import torch

from qkv.config import GPTConfig, TrainingConfig
from qkv.data import prefetch
from qkv.data.token_batches import TokenBatch
from qkv.errors import ConfigError, RunError, TrainingError
from qkv.models import GPT
from qkv.tensors import IGNORE_INDEX
from qkv.training import Trainer, TrainingData, open_run
from qkv.training.gpt import next_token_objective
from qkv.training.objectives import LossOutput, Metric
from qkv.training.optimizer import clip_gradients
from qkv.training.step import build_train_step
from tests.training.runs import (
    build_cpu_trainer,
    checkpoint_contents,
    logged_metrics,
    resume_to_end,
    train_until_signal,
)

VOCAB_SIZE = 19


def batch(lengths, *, seed=0, width=13, documents=None) -> TokenBatch:
    """Rows of which only the first `lengths` positions have a target."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB_SIZE, (len(lengths), width), generator=generator)
    targets = torch.randint(0, VOCAB_SIZE, (len(lengths), width), generator=generator)
    for row, length in enumerate(lengths):
        targets[row, length:] = IGNORE_INDEX
    return TokenBatch(ids, targets, documents, torch.tensor(lengths))


def bare_trainer(run_folder, load_batch, *, model=None, dropout=0.0, **training) -> Trainer:
    """Build a trainer for batches that the test creates itself."""
    config = GPTConfig(vocab_size=VOCAB_SIZE, context_length=13, n_layers=2, d_model=14, n_heads=2, dropout=dropout)
    model = model or GPT(config, seed=3)
    settings = TrainingConfig(
        **{"steps": 4, "batch_size": len(load_batch(0).counts), "seq_len": 13, "warmup_steps": 0, "save_every": 2}
        | training
    )
    train_step = build_train_step(model, settings, lambda: next_token_objective(model, settings))
    return Trainer(train_step, data=TrainingData(batch=load_batch), run=run_folder, texts={})


def gradients(trainer, given_batch):
    output = trainer.train_step.compute_gradients(given_batch, 0)
    if trainer.config.max_grad_norm is not None:
        for optimizer in trainer.train_step.optimizers:
            clip_gradients(optimizer, output.grad_norm, trainer.config.max_grad_norm)
    metrics = output.to_metrics(output.values)
    return metrics.loss, metrics.grad_norm, {name: p.grad for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3])
def test_accumulated_gradients_equal_those_of_the_full_batch_with_unequal_target_counts(run, micro_batch_size):
    given_batch = batch([13, 1, 7, 2, 13, 5])
    folder = run().run
    loss, norm, full = gradients(bare_trainer(folder, lambda _t: given_batch, max_grad_norm=None), given_batch)
    accumulating = bare_trainer(folder, lambda _t: given_batch, max_grad_norm=None, micro_batch_size=micro_batch_size)
    accumulated_loss, accumulated_norm, accumulated = gradients(accumulating, given_batch)
    assert accumulated_loss == pytest.approx(loss, rel=1e-6)
    assert accumulated_norm == pytest.approx(norm, rel=1e-6)
    difference = torch.cat([(full[name] - accumulated[name]).flatten() for name in full])
    assert float(difference.norm()) <= 1e-6 * norm
    # The average of the row losses differs from the loss, because rows have different numbers of targets.
    rows = [
        gradients(bare_trainer(folder, lambda _t, row=row: row, max_grad_norm=None), row)[0]
        for row in given_batch.split(1)
    ]
    assert abs(sum(rows) / 6 - loss) > 1e-3


def test_packed_documents_have_the_gradients_of_separate_documents(run):
    folder = run().run
    ids = torch.randint(0, VOCAB_SIZE, (1, 13))
    targets = torch.randint(0, VOCAB_SIZE, (1, 13))
    packed = TokenBatch(ids, targets, torch.tensor([[4] * 5 + [5] * 8]), torch.tensor([13]))
    loss, _, packed_gradients = gradients(bare_trainer(folder, lambda _t: packed, max_grad_norm=None), packed)
    loss_sum, separate = 0.0, {}
    for part in (slice(0, 5), slice(5, 13)):
        document = TokenBatch(ids[:, part], targets[:, part], None, torch.tensor([part.stop - part.start]))
        document_loss, _, grads = gradients(
            bare_trainer(folder, lambda _t, document=document: document, max_grad_norm=None), document
        )
        n = part.stop - part.start
        loss_sum += document_loss * n
        separate = {name: separate.get(name, 0) + g * n / 13 for name, g in grads.items()}
    assert loss == pytest.approx(loss_sum / 13, rel=1e-6)
    for name, g in packed_gradients.items():
        torch.testing.assert_close(g, separate[name], rtol=1e-5, atol=1e-6)


def test_gradients_are_clipped_and_the_norm_before_clipping_is_reported(run):
    given_batch = batch([13, 7])
    trainer = bare_trainer(run().run, lambda _t: given_batch, max_grad_norm=0.01)
    _, norm, clipped = gradients(trainer, given_batch)
    assert norm > 0.1
    assert float(torch.linalg.vector_norm(torch.stack([g.norm() for g in clipped.values()]))) == pytest.approx(
        0.01, rel=1e-3
    )


@pytest.mark.parametrize("across", [True, False])
@pytest.mark.parametrize("n_workers", [1, 2, 4])
def test_batches_do_not_depend_on_workers_and_ranks(run, n_workers, across):
    prepared_copy = run(cross_documents=across)
    data = prepared_copy.corpus.data(prepared_copy.recipe.training)
    expected = [data.batch(t) for t in range(7)]
    ahead = prefetch(data.batch, 0, stop=7, n_workers=n_workers, n_ahead=5)
    batches = data.batch.__self__
    for t, (batch, prefetched) in enumerate(zip(expected, ahead, strict=True)):
        shares = [batches.batch(t, rank=rank, world_size=n_workers) for rank in range(n_workers)]
        assert torch.equal(batch.ids, prefetched.ids)
        assert torch.equal(batch.targets, torch.cat([share.targets for share in shares]))
        assert (batch.document_ids is None) == across
        if not across:
            assert torch.equal(batch.document_ids, torch.cat([share.document_ids for share in shares]))


def test_a_resumed_run_equals_an_uninterrupted_one(run, trained):
    stopped = run()
    for n_steps in (1, 5, 6, 13):
        trainer = build_cpu_trainer(open_run(stopped.run.path))
        trainer.resume(print)
        train_until_signal(trainer, n_steps)
        assert stopped.run.checkpoint_steps()[-1] == n_steps
    resume_to_end(stopped.run.path)
    assert logged_metrics(stopped.run.path) == logged_metrics(trained.run.path)
    assert checkpoint_contents(stopped.run.path).keys() >= checkpoint_contents(trained.run.path).keys()


def test_a_signal_interrupts_an_evaluation_and_the_resumed_run_repeats_it(run, trained):
    stopped = run()
    trainer = build_cpu_trainer(stopped)
    batches, evaluated_steps = trainer.data.validation, []

    def batches_with_signal():
        for given_batch in batches():
            evaluated_steps.append(trainer.progress.step)
            if len(evaluated_steps) == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield given_batch

    trainer.data = replace(trainer.data, validation=batches_with_signal)
    assert trainer.train().signal is signal.SIGINT
    assert evaluated_steps == [5, 5]
    assert len(list(batches())) > 3
    assert trainer.progress.last_eval_step == 0
    assert resume_to_end(stopped.run.path) == []
    assert logged_metrics(stopped.run.path) == logged_metrics(trained.run.path)
    assert checkpoint_contents(stopped.run.path) == checkpoint_contents(trained.run.path)


def test_a_signal_does_not_interrupt_the_last_evaluation(run, trained):
    stopped = run()
    trainer = build_cpu_trainer(stopped)
    batches = trainer.data.validation

    def batches_with_signal():
        if trainer.progress.step == 13:
            os.kill(os.getpid(), signal.SIGINT)
        return batches()

    trainer.data = replace(trainer.data, validation=batches_with_signal)
    trainer.train()
    assert logged_metrics(stopped.run.path) == logged_metrics(trained.run.path)
    assert checkpoint_contents(stopped.run.path) == checkpoint_contents(trained.run.path)


def test_training_stops_early_after_patience_evaluations_without_improvement(run):
    early = run(patience=2, eval_every=2, learning_rate=1e-9, steps=99, warmup_steps=0)
    trainer = build_cpu_trainer(early)
    trainer.train_step.objective = objective_that_gets_worse(trainer)
    trainer.train()
    assert (trainer.progress.step, trainer.progress.best_step, trainer.progress.n_evals_since_best) == (6, 2, 2)
    assert early.run.best_or_latest_checkpoint() == early.run.checkpoint_folder(2)
    resume_to_end(early.run.path)
    assert logged_metrics(early.run.path)[-1]["step"] == 6


def objective_that_gets_worse(trainer):
    original = trainer.train_step.objective
    return lambda micro_batch: LossOutput(
        original(micro_batch).loss * (1 if trainer.model.training else 1 + trainer.progress.step)
    )


def at_step(trainer, step, poison):
    trainer.report = lambda entry: poison() if entry["step"] == step and "loss" in entry else None
    return trainer


def fails(trainer, message, last_step):
    """Check that training fails with this message and that the last checkpoint is still valid."""
    with pytest.raises(TrainingError, match=message):
        trainer.train()
    assert trainer.run.checkpoint_steps()[-1] == last_step
    assert trainer.run.latest_valid_checkpoint(pytest.fail)[0].step == last_step


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_weight_is_named_before_the_update(run, value):
    trainer = build_cpu_trainer(run(save_every=2))
    name = "blocks.1.feed_forward.up_proj.weight"
    weight = trainer.model.get_parameter(name)
    before = {}

    def poison():
        weight.data.view(-1)[3] = value
        before.update({name: p.detach().clone() for name, p in trainer.model.named_parameters()})

    at_step(trainer, 3, poison)
    fails(trainer, rf"step 3: loss nan: .*{re.escape(name)}.* step 2 ", last_step=2)
    for other, p in trainer.model.named_parameters():
        assert torch.equal(p.nan_to_num(), before[other].nan_to_num())


def test_an_unused_non_finite_weight_is_never_saved(run):
    trainer = build_cpu_trainer(run(save_every=2, eval_every=99))
    position = trainer.model.embedding.position.table.weight
    # Windows of 11 tokens never use positions from 11 on.
    at_step(trainer, 3, lambda: position.data[12].fill_(float("nan")))
    fails(trainer, r"step 4: .*embedding\.position\.table\.weight.* step 2 ", last_step=2)


def test_the_first_non_finite_output_is_named(run):
    trainer = build_cpu_trainer(run(save_every=2))
    attention = trainer.model.blocks[1].attention

    def poison():
        attention.register_forward_hook(lambda _module, _inputs, output: output / 0)

    at_step(trainer, 3, poison)
    fails(trainer, r"step 3: loss nan: .*blocks\.1\.attention\b", last_step=2)


def test_a_non_finite_gradient_is_named(run):
    trainer = build_cpu_trainer(run(save_every=2))
    norm = trainer.model.final_norm.weight
    at_step(trainer, 3, lambda: norm.register_hook(lambda gradient: gradient * float("inf")))
    fails(trainer, r"step 3: loss [\d.]+: .*final_norm\.weight\b", last_step=2)


def test_ids_outside_the_vocabulary_raise_an_error_with_the_step(run):
    for field in ("ids", "targets"):
        trainer = build_cpu_trainer(run(field, save_every=2))
        original = trainer.data.batch

        def given_batch(t, original=original, field=field):
            good = original(t)
            bad = getattr(good, field).clone()
            bad[0, -1] = 999
            return replace(good, **{field: bad}) if t == 3 else good

        trainer.data = replace(trainer.data, batch=given_batch)
        fails(
            trainer,
            rf"step 3: .*\b999\b.*\b15\b.*{re.escape(str(trainer.run.path))}",
            last_step=2,
        )


def test_a_batch_without_targets_raises_an_error(run):
    trainer = bare_trainer(run().run, lambda _t: batch([0, 0]))
    with pytest.raises(TrainingError, match=r"step 0: "):
        trainer.train()


def test_resuming_with_another_model_size_raises_an_error(run):
    changed = run()
    build_cpu_trainer(changed).train()
    recipe = changed.recipe.replace(model={**changed.recipe.model, "d_model": 16})
    trainer = build_cpu_trainer(replace(changed, recipe=recipe))
    with pytest.raises(RunError, match=r"step-00000013: .*\(\d+, 14\)"):
        trainer.resume(print)


def test_a_finished_run_can_be_extended(run):
    finished = run(schedule="constant")
    build_cpu_trainer(finished).train()
    more = finished.recipe.training.replace(steps=17)
    trainer = build_cpu_trainer(replace(finished, recipe=finished.recipe.replace(training=more)))
    trainer.resume(print)
    trainer.train()
    assert [line["step"] for line in logged_metrics(finished.run.path) if "loss" in line] == list(range(1, 18))


def test_measuring_steps_writes_no_metrics(run):
    timed = run()
    assert build_cpu_trainer(timed).train_and_measure_step_seconds(2) > 0
    assert not timed.run.metrics.exists()


def test_the_first_step_with_each_batch_is_not_timed(run):
    trainer = build_cpu_trainer(run(batch_size=2, micro_batch_size=2))
    objective, clock, batches = trainer.train_step.objective, [0.0], set()

    def slow_for_new_batches(batch):
        key = batch.ids.numpy().tobytes()
        clock[0] += 1.0 if key in batches else 100.0
        batches.add(key)
        return objective(batch)

    trainer.train_step.objective = slow_for_new_batches
    assert trainer.train_and_measure_step_seconds(5, clock=lambda: clock[0]) == 1.0
    assert len(batches) == 5


def test_metrics_are_logged_as_totals_over_counts_together_with_generation_metrics(run):
    prepared_copy = run(batch_size=6, micro_batch_size=2, steps=2, eval_every=2, warmup_steps=0)
    trainer = build_cpu_trainer(prepared_copy)
    original = trainer.train_step.objective
    rows = []

    def objective_with_metric(part):
        rows.append(len(part.ids))
        # 1 of 1, 2 of 4, 3 of 9 …: the total over the count differs from an average of averages.
        n = torch.tensor(float(len(rows)))
        return LossOutput(original(part).loss, {"correct": Metric(n, n * n)})

    trainer.train_step.objective = objective_with_metric
    trainer.generation_metrics = lambda: {"bleu": 12.5, "is_eval": not trainer.model.training}
    trainer.train()
    entries = [json.loads(line) for line in prepared_copy.run.metrics.read_text().splitlines()]
    assert entries[0]["correct"] == pytest.approx((1 + 2 + 3) / (1 + 4 + 9))
    assert entries[1]["correct"] == pytest.approx((4 + 5 + 6) / (16 + 25 + 36))
    n = range(7, len(rows) + 1)
    assert entries[2]["validation_correct"] == pytest.approx(sum(n) / sum(i * i for i in n))
    assert entries[2]["bleu"] == 12.5
    assert entries[2]["is_eval"]


def test_an_unknown_best_metric_raises_an_error(run):
    trainer = bare_trainer(run().run, lambda _t: batch([5, 3]), best_metric="acuracy", eval_every=1)
    trainer.data = TrainingData(batch=trainer.data.batch, validation=lambda: [batch([7, 2])])
    with pytest.raises(ConfigError, match=r"best_metric .*, got 'acuracy'$"):
        trainer.train()
