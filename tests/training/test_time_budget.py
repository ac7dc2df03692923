"""Tests for the time budget of runs."""

from dataclasses import replace

import pytest

from qkv.training import (
    SINGLE_PROCESS,
    TimeBudgetReplanner,
    TrainingProgress,
    choose_gpt_recipe_except_steps,
    fit_steps_to_time,
    open_run,
    write_recipe,
)
from qkv.training.optimizer import learning_rate
from tests.training.runs import build_cpu_trainer, copy_run, logged_metrics, prepare_small_run, resume_to_end

SECONDS = 307.0


class SimulatedRun:
    """Simulated run: a step takes `seconds_at(t)` at time t, and a validation batch a third of that."""

    def __init__(self, seconds_at, *, measured):
        recipe = choose_gpt_recipe_except_steps(["a.txt"], n_bytes=10**6, seconds=SECONDS, flops_per_second=5e10)
        self.config = fit_steps_to_time(recipe, seconds=SECONDS, seconds_per_step=measured).training
        self.seconds_at, self.time, self.plans = seconds_at, 0.0, []

    def run(self):
        budget, progress = (
            TimeBudgetReplanner(SECONDS, on_replan=self.plans.append, clock=lambda: self.time),
            TrainingProgress(environment="here"),
        )
        while progress.step < self.config.steps:
            if plan := budget.replan(self.config, progress, SINGLE_PROCESS):
                budget.on_replan(plan)
                self.config = plan
            seconds = self.seconds_at(self.time)
            progress = replace(progress, step=progress.step + 1, seconds=progress.seconds + seconds)
            self.time += seconds
            if progress.step % self.config.eval_every == 0:
                self.time += seconds * self.config.eval_batches / 3
        return self


def test_constant_throughput_keeps_the_first_plan():
    simulated = SimulatedRun(lambda _t: 0.1, measured=0.1).run()
    assert simulated.plans == []
    assert 0.85 * SECONDS < simulated.time < SECONDS


@pytest.mark.parametrize(
    ("seconds_at", "measured"),
    [
        (lambda _t: 0.1, 2.0),  # slow while it was measured
        (lambda _t: 2.0, 0.1),  # fast while it was measured
        (lambda t: 1.0 if t < 101 else 0.1, 1.0),  # slow for a third of the run
        (lambda t: 0.1 if t < 101 else 0.5, 0.1),  # slow after a third of the run
        (lambda t: 0.1 if int(t / 13) % 2 else 0.3, 0.2),  # alternating
    ],
    ids=["measured-slow", "measured-fast", "slow-then-fast", "fast-then-slow", "alternating"],
)
def test_a_run_ends_on_time_when_throughput_changes(seconds_at, measured):
    simulated = SimulatedRun(seconds_at, measured=measured).run()
    assert simulated.plans
    assert 0.8 * SECONDS < simulated.time < 1.1 * SECONDS
    assert len(simulated.plans) <= 24
    assert learning_rate(simulated.config, simulated.config.steps) < 0.2 * simulated.config.learning_rate


def replanned_run(folder, monkeypatch):
    """Prepare and train a run that is replanned from 13 to 17 steps at step 4."""
    prepared = prepare_small_run(folder, schedule="linear")
    monkeypatch.setattr(
        TimeBudgetReplanner,
        "_replan_total_steps",
        lambda _self, config, progress: 17 if progress.step == 4 else config.steps,
    )

    def save_plan(plan):
        write_recipe(prepared.run, prepared.recipe.replace(training=plan))

    build_cpu_trainer(prepared).train(TimeBudgetReplanner(1.0, on_replan=save_plan))
    return prepared


def test_a_replanned_run_follows_its_recipe_and_resumes_bit_for_bit(tmp_path, monkeypatch):
    replanned = replanned_run(tmp_path / "a", monkeypatch)
    recipe = open_run(replanned.run.path).recipe
    assert (recipe.training.steps, recipe.training.replans) == (17, ((4, 13),))
    assert 4 in [line["step"] for line in logged_metrics(replanned.run.path)]
    last = replanned.run.checkpoint_folder(17) / "model.safetensors"

    other = prepare_small_run(tmp_path / "b", schedule="linear")
    repeated = copy_run(other, tmp_path / "again", **recipe.training.model_dump())
    build_cpu_trainer(repeated).train()
    assert (repeated.run.checkpoint_folder(17) / "model.safetensors").read_bytes() == last.read_bytes()

    damaged = copy_run(replanned, tmp_path / "damaged")
    for step in damaged.run.checkpoint_steps()[1:]:
        (damaged.run.checkpoint_folder(step) / "model.safetensors").write_bytes(b"damaged")
    resume_to_end(damaged.run.path)
    assert (damaged.run.checkpoint_folder(17) / "model.safetensors").read_bytes() == last.read_bytes()
