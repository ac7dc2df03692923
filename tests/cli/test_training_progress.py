"""What is said while a run goes: its speed is measured by the work that the line before the run tells of."""

import pytest

from qkv.cli.training_progress import TrainingProgress
from qkv.config import preset
from qkv.cost import estimate_run


@pytest.mark.parametrize("settings", [{}, {"predictions": 19}, {"accumulation": 3, "checkpointing": True}])
def test_the_share_of_the_peak_counts_the_plans_own_flops(capsys, settings):
    plan = estimate_run(preset("bert-tiny"), batch=7, length=128, steps=11, matmul_rate=1e12, **settings)
    a_step = plan.flops / plan.steps / 1e12
    with TrainingProgress(plan) as progress:
        for step in (1, 2, 3):
            progress.report({"step": step, "loss": 1.5, "tokens": 896 * step, "seconds": 4 * a_step * step})
        progress.report({"step": 3, "validation_loss": 1.25, "is_best": True})
    assert "validation loss 1.2500 (best so far)" in (said := capsys.readouterr().err)
    assert "25% of peak" in said


def test_a_last_step_that_moves_is_said(capsys):
    plan = estimate_run(preset("bert-tiny"), batch=7, length=128, steps=11, matmul_rate=1e12)
    with TrainingProgress(plan) as progress:
        progress.replan(1013)
        progress.replan(17)
    assert capsys.readouterr().err.splitlines() == [
        "at this pace 1,013 steps fit; 11 were planned", "at this pace 17 steps fit; 1,013 were planned",
    ]  # fmt: skip
