"""A run that is given a time ends about then, however the machine's pace changes; and its numbers stay its recipe's."""

from dataclasses import replace

import pytest

from qkv.training import (
    SINGLE_PROCESS,
    TimeBudget,
    TrainingProgress,
    choose_gpt_recipe,
    fit_steps_to_time,
    open_run,
    write_recipe,
)
from qkv.training.schedule import learning_rate
from tests.training.runs import copy_of, curve, go_on, make_ready, trainer_of

SECONDS = 307.0


class Machine:
    """A run in pretended time: `pace(t)` is what a step takes at time t; a batch of an evaluation, a third of that."""

    def __init__(self, pace, *, first):
        recipe = choose_gpt_recipe(["a.txt"], n_bytes=10**6, seconds=SECONDS, flops_per_second=5e10)
        self.config = fit_steps_to_time(recipe, seconds=SECONDS, seconds_per_step=first).training
        self.pace, self.time, self.plans = pace, 0.0, []

    def run(self):
        clock, progress = TimeBudget(SECONDS, on_replan=self.plans.append, clock=lambda: self.time), TrainingProgress(environment="here")
        while progress.step < self.config.steps:
            if plan := clock.plan(self.config, progress, SINGLE_PROCESS):
                clock.keep(plan)
                self.config = plan
            took = self.pace(self.time)
            progress = replace(progress, step=progress.step + 1, seconds=progress.seconds + took)
            self.time += took
            if progress.step % self.config.eval_every == 0:
                self.time += took * self.config.eval_batches / 3
        return self


def test_a_steady_machine_keeps_its_first_plan():
    machine = Machine(lambda _t: 0.1, first=0.1).run()
    assert machine.plans == []
    assert 0.85 * SECONDS < machine.time < SECONDS


@pytest.mark.parametrize(
    ("pace", "first"),
    [
        (lambda _t: 0.1, 2.0),  # busy while it was timed
        (lambda _t: 2.0, 0.1),  # idle while it was timed
        (lambda t: 1.0 if t < 101 else 0.1, 1.0),  # busy for a third
        (lambda t: 0.1 if t < 101 else 0.5, 0.1),  # busy after a third
        (lambda t: 0.1 if int(t / 13) % 2 else 0.3, 0.2),  # by turns
    ],
    ids=["timed-slow", "timed-fast", "slow-then-fast", "fast-then-slow", "by-turns"],
)
def test_it_ends_when_it_was_meant_to_whatever_the_pace(pace, first):
    machine = Machine(pace, first=first).run()
    assert machine.plans
    assert 0.8 * SECONDS < machine.time < 1.1 * SECONDS
    assert len(machine.plans) <= 24
    assert learning_rate(machine.config, machine.config.steps) < 0.2 * machine.config.learning_rate


def moved_run(folder, monkeypatch):
    """From 13 steps to 17, seen at step 4."""
    prepared = make_ready(folder, schedule="linear")
    monkeypatch.setattr(TimeBudget, "_last_step", lambda _self, config, progress: 17 if progress.step == 4 else config.steps)

    def keep(plan):
        write_recipe(prepared.run, prepared.recipe.replace(training=plan))

    trainer_of(prepared).train(TimeBudget(1.0, on_replan=keep))
    return prepared


def test_a_moved_run_is_its_recipes_and_goes_on_from_any_checkpoint_to_the_same_bits(tmp_path, monkeypatch):
    moved = moved_run(tmp_path / "a", monkeypatch)
    recipe = open_run(moved.run.path).recipe
    assert (recipe.training.steps, recipe.training.replans) == (17, ((4, 13),))
    assert 4 in [line["step"] for line in curve(moved.run.path)]
    last = moved.run.checkpoint_folder(17) / "model.safetensors"

    other = make_ready(tmp_path / "b", schedule="linear")
    again = copy_of(other, tmp_path / "again", **recipe.training.model_dump())
    trainer_of(again).train()
    assert (again.run.checkpoint_folder(17) / "model.safetensors").read_bytes() == last.read_bytes()

    kept = copy_of(moved, tmp_path / "kept")
    for step in kept.run.checkpoint_steps()[1:]:
        (kept.run.checkpoint_folder(step) / "model.safetensors").write_bytes(b"damaged")
    go_on(kept.run.path)
    assert (kept.run.checkpoint_folder(17) / "model.safetensors").read_bytes() == last.read_bytes()
