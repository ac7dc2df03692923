"""The loop: batches in parts, packed documents, numbers that are none, stopping early, stopping when asked."""

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
from tests.training.runs import checkpoints, curve, go_on, stopped_after, trainer_of

N_WORDS = 19


def batch(lengths, *, seed=0, width=13, documents=None) -> TokenBatch:
    """Rows of which only the first `lengths` positions have a target."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, N_WORDS, (len(lengths), width), generator=generator)
    targets = torch.randint(0, N_WORDS, (len(lengths), width), generator=generator)
    for row, length in enumerate(lengths):
        targets[row, length:] = IGNORE_INDEX
    return TokenBatch(ids, targets, documents, torch.tensor(lengths))


def bare_trainer(run_folder, given, *, model=None, dropout=0.0, **training) -> Trainer:
    """On batches that the test makes itself."""
    config = GPTConfig(vocab_size=N_WORDS, context_length=13, n_layers=2, d_model=14, n_heads=2, dropout=dropout)
    model = model or GPT(config, seed=3)
    settings = TrainingConfig(
        **{"steps": 4, "batch_size": len(given(0).counts), "seq_len": 13, "warmup_steps": 0, "save_every": 2} | training
    )
    objective = next_token_objective(model, settings)
    return Trainer(model, settings, objective=objective, data=TrainingData(batch=given), run=run_folder, texts={})


def gradients(trainer, given):
    unread = trainer._gradients(given, 0)
    if trainer.config.clip is not None:
        for optimizer in trainer.optimizers:
            clip_gradients(optimizer, unread.made.norm, trainer.config.clip)
    made = unread.read()
    return made.loss, made.norm, {name: p.grad for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3])
def test_parts_of_a_batch_add_up_to_the_whole_with_unequal_counts(run, micro_batch_size):
    given = batch([13, 1, 7, 2, 13, 5])
    folder = run().run
    loss, norm, whole = gradients(bare_trainer(folder, lambda _t: given, max_grad_norm=None), given)
    parts = bare_trainer(folder, lambda _t: given, max_grad_norm=None, micro_batch_size=micro_batch_size)
    part_loss, part_norm, parted = gradients(parts, given)
    assert part_loss == pytest.approx(loss, rel=1e-6)
    assert part_norm == pytest.approx(norm, rel=1e-6)
    difference = torch.cat([(whole[name] - parted[name]).flatten() for name in whole])
    assert float(difference.norm()) <= 1e-6 * norm
    # The average of the parts' averages, which this is not, would be far off.
    rows = [gradients(bare_trainer(folder, lambda _t, row=row: row, max_grad_norm=None), row)[0] for row in given.split(1)]
    assert abs(sum(rows) / 6 - loss) > 1e-3


def test_packed_documents_are_trained_as_if_they_were_alone(run):
    folder = run().run
    ids = torch.randint(0, N_WORDS, (1, 13))
    targets = torch.randint(0, N_WORDS, (1, 13))
    packed = TokenBatch(ids, targets, torch.tensor([[4] * 5 + [5] * 8]), torch.tensor([13]))
    loss, _, together = gradients(bare_trainer(folder, lambda _t: packed, max_grad_norm=None), packed)
    sums, apart = 0.0, {}
    for part in (slice(0, 5), slice(5, 13)):
        alone = TokenBatch(ids[:, part], targets[:, part], None, torch.tensor([part.stop - part.start]))
        one, _, grads = gradients(bare_trainer(folder, lambda _t, alone=alone: alone, max_grad_norm=None), alone)
        n = part.stop - part.start
        sums += one * n
        apart = {name: apart.get(name, 0) + g * n / 13 for name, g in grads.items()}
    assert loss == pytest.approx(sums / 13, rel=1e-6)
    for name, g in together.items():
        torch.testing.assert_close(g, apart[name], rtol=1e-5, atol=1e-6)


def test_gradients_are_clipped_to_the_norm_and_reported_before(run):
    given = batch([13, 7])
    trainer = bare_trainer(run().run, lambda _t: given, max_grad_norm=0.01)
    _, norm, clipped = gradients(trainer, given)
    assert norm > 0.1
    assert float(torch.linalg.vector_norm(torch.stack([g.norm() for g in clipped.values()]))) == pytest.approx(
        0.01, rel=1e-3
    )


@pytest.mark.parametrize("across", [True, False])
@pytest.mark.parametrize("n_workers", [1, 2, 4])
def test_workers_and_ranks_change_no_batch(run, n_workers, across):
    ready = run(cross_documents=across)
    data = ready.corpus.data(ready.recipe.training)
    expected = [data.batch(t) for t in range(7)]
    ahead = prefetch(data.batch, 0, stop=7, n_workers=n_workers, n_ahead=5)
    batches = data.batch.__self__
    for t, (one, other) in enumerate(zip(expected, ahead, strict=True)):
        shares = [batches.batch(t, rank=rank, world=n_workers) for rank in range(n_workers)]
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.targets, torch.cat([share.targets for share in shares]))
        assert (one.document_ids is None) == across
        if not across:
            assert torch.equal(one.document_ids, torch.cat([share.document_ids for share in shares]))


def test_a_run_stopped_and_resumed_is_the_unbroken_one(run, trained):
    stopped = run()
    for n_steps in (1, 5, 6, 13):
        trainer = trainer_of(open_run(stopped.run.path))
        trainer.resume(print)
        stopped_after(trainer, n_steps)
        assert stopped.run.checkpoint_steps()[-1] == n_steps
    go_on(stopped.run.path)
    assert curve(stopped.run.path) == curve(trained.run.path)
    assert checkpoints(stopped.run.path).keys() >= checkpoints(trained.run.path).keys()


def test_a_signal_during_an_evaluation_cuts_it_short_and_the_resumed_run_does_it_again(run, trained):
    stopped = run()
    trainer = trainer_of(stopped)
    sweep, asked = trainer.data.validation, []

    def signalled():
        for given in sweep():
            asked.append(trainer.progress.step)
            if len(asked) == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield given

    trainer.data = replace(trainer.data, validation=signalled)
    assert trainer.train().signal is signal.SIGINT
    assert asked == [5, 5]
    assert len(list(sweep())) > 3
    assert trainer.progress.last_eval_step == 0
    assert go_on(stopped.run.path) == []
    assert curve(stopped.run.path) == curve(trained.run.path)
    assert checkpoints(stopped.run.path) == checkpoints(trained.run.path)


def test_an_evaluation_that_ends_the_run_is_finished(run, trained):
    stopped = run()
    trainer = trainer_of(stopped)
    sweep = trainer.data.validation

    def signalled():
        if trainer.progress.step == 13:
            os.kill(os.getpid(), signal.SIGINT)
        return sweep()

    trainer.data = replace(trainer.data, validation=signalled)
    trainer.train()
    assert curve(stopped.run.path) == curve(trained.run.path)
    assert checkpoints(stopped.run.path) == checkpoints(trained.run.path)


def test_it_stops_after_so_many_evaluations_without_a_better_loss(run):
    early = run(patience=2, eval_every=2, learning_rate=1e-9, steps=99, warmup_steps=0)
    trainer = trainer_of(early)
    trainer.objective = worse_each_time(trainer)
    trainer.train()
    assert (trainer.progress.step, trainer.progress.best_step, trainer.progress.n_evals_since_best) == (6, 2, 2)
    assert early.run.best_checkpoint() == early.run.checkpoint_folder(2)
    go_on(early.run.path)
    assert curve(early.run.path)[-1]["step"] == 6


def worse_each_time(trainer):
    plain = trainer.objective
    return lambda part: LossOutput(plain(part).loss * (1 if trainer.model.training else 1 + trainer.progress.step))


def at_step(trainer, step, poison):
    trainer.report = lambda entry: poison() if entry["step"] == step and "loss" in entry else None
    return trainer


def fails(trainer, message, kept):
    """It stops with this line, no weight has changed, and the last checkpoint is as it was."""
    with pytest.raises(TrainingError, match=message):
        trainer.train()
    assert trainer.run.checkpoint_steps()[-1] == kept
    assert trainer.run.latest_valid_checkpoint(pytest.fail)[0].step == kept


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_named_before_the_update(run, value):
    trainer = trainer_of(run(save_every=2))
    name = "blocks.1.feed_forward.up_proj.weight"
    weight = trainer.model.get_parameter(name)
    before = {}

    def poison():
        weight.data.view(-1)[3] = value
        before.update({name: p.detach().clone() for name, p in trainer.model.named_parameters()})

    at_step(trainer, 3, poison)
    message = rf"step 3: loss nan: weight {re.escape(name)} is not a finite number; no update was made, "
    fails(trainer, message + "the checkpoint of step 2 is intact", kept=2)
    for other, p in trainer.model.named_parameters():
        assert torch.equal(p.nan_to_num(), before[other].nan_to_num())


def test_a_bad_weight_that_no_loss_shows_never_gets_into_a_checkpoint(run):
    trainer = trainer_of(run(save_every=2, eval_every=99))
    position = trainer.model.embedding.position.table.weight
    # Positions from 11 on are never used by windows of 11.
    at_step(trainer, 3, lambda: position.data[12].fill_(float("nan")))
    fails(trainer, r"step 4: weight embedding\.position\.table\.weight is not a finite number; nothing was saved, "
                   "the checkpoint of step 2 is intact", kept=2)  # fmt: skip


def test_the_first_output_that_is_no_number_is_named(run):
    trainer = trainer_of(run(save_every=2))
    attention = trainer.model.blocks[1].attention

    def poison():
        attention.register_forward_hook(lambda _part, _inputs, output: output / 0)

    at_step(trainer, 3, poison)
    fails(trainer, r"step 3: loss nan: the output of blocks\.1\.attention is not a finite number", kept=2)


def test_a_gradient_that_is_no_number_is_named(run):
    trainer = trainer_of(run(save_every=2))
    norm = trainer.model.final_norm.weight
    at_step(trainer, 3, lambda: norm.register_hook(lambda gradient: gradient * float("inf")))
    fails(trainer, r"step 3: loss [\d.]+: the gradient of final_norm\.weight is not a finite number", kept=2)


def test_ids_outside_the_vocabulary_are_refused_with_the_step(run):
    for place in ("ids", "targets"):
        trainer = trainer_of(run(place, save_every=2))
        plain = trainer.data.batch

        def given(t, plain=plain, place=place):
            good = plain(t)
            bad = getattr(good, place).clone()
            bad[0, -1] = 999
            return replace(good, **{place: bad}) if t == 3 else good

        trainer.data = replace(trainer.data, batch=given)
        fails(
            trainer,
            "step 3: id 999 is outside the vocabulary of 16 .*, in a batch of /.+; no update was made",
            kept=2,
        )


def test_a_batch_without_targets_is_refused(run):
    trainer = bare_trainer(run().run, lambda _t: batch([0, 0]))
    with pytest.raises(
        TrainingError, match=r"step 0: the batch has no target to predict; .*there is no checkpoint yet"
    ):
        trainer.train()


def test_a_recipe_changed_to_another_shape_is_said_on_resume(run):
    changed = run()
    trainer_of(changed).train()
    recipe = changed.recipe.replace(model={**changed.recipe.model, "d_model": 16})
    trainer = trainer_of(replace(changed, recipe=recipe))
    said = r"step-00000013: was the recipe changed\? weights do not fit the model: (\d+) misshapen: .* and (\d+) more$"
    with pytest.raises(RunError, match=said) as error:
        trainer.resume(print)
    assert str(error.value).count("must be") == 2


def test_more_steps_can_be_asked_of_a_finished_run(run):
    finished = run(schedule="constant")
    trainer_of(finished).train()
    more = finished.recipe.training.replace(steps=17)
    trainer = trainer_of(replace(finished, recipe=finished.recipe.replace(training=more)))
    trainer.resume(print)
    trainer.train()
    assert [line["step"] for line in curve(finished.run.path) if "loss" in line] == list(range(1, 18))


def test_timing_the_steps_takes_no_note(run):
    timed = run()
    assert trainer_of(timed).measure_seconds_per_step(2) > 0
    assert not timed.run.metrics.exists()


def test_the_first_step_with_each_batch_is_not_timed(run):
    trainer = trainer_of(run(batch_size=2, micro_batch_size=2))
    objective, clock, batches = trainer.objective, [0.0], set()

    def slow_for_new_batches(batch):
        key = batch.ids.numpy().tobytes()
        clock[0] += 1.0 if key in batches else 100.0
        batches.add(key)
        return objective(batch)

    trainer.objective = slow_for_new_batches
    assert trainer.measure_seconds_per_step(5, now=lambda: clock[0]) == 1.0
    assert len(batches) == 5


def test_what_an_objective_measures_is_logged_as_sums_over_counts_and_an_examination_beside_it(run):
    ready = run(batch_size=6, micro_batch_size=2, steps=2, eval_every=2, warmup_steps=0)
    trainer = trainer_of(ready)
    plain = trainer.objective
    rows = []

    def measured(part):
        rows.append(len(part.ids))
        # 1 right of 1, 2 of 4, 3 of 9 …: sums over counts differ from an average of averages.
        n = torch.tensor(float(len(rows)))
        return LossOutput(plain(part).loss, {"right": Metric(n, n * n)})

    trainer.objective = measured
    trainer.generation_metrics = lambda: {"bleu": 12.5, "is_eval": not trainer.model.training}
    trainer.train()
    entries = [json.loads(line) for line in ready.run.metrics.read_text().splitlines()]
    assert entries[0]["right"] == pytest.approx((1 + 2 + 3) / (1 + 4 + 9))
    assert entries[1]["right"] == pytest.approx((4 + 5 + 6) / (16 + 25 + 36))
    n = range(7, len(rows) + 1)
    assert entries[2]["validation_right"] == pytest.approx(sum(n) / sum(i * i for i in n))
    assert entries[2]["bleu"] == 12.5
    assert entries[2]["is_eval"]


def test_a_best_by_that_nothing_measures_is_refused(run):
    trainer = bare_trainer(run().run, lambda _t: batch([5, 3]), best_metric="acuracy", eval_every=1)
    trainer.data = TrainingData(batch=trainer.data.batch, validation=lambda: [batch([7, 2])])
    with pytest.raises(ConfigError, match="best_metric='acuracy' is not measured here; known: none"):
        trainer.train()
