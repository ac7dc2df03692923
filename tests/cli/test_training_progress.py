"""The progress display of a training run."""

import pytest

from qkv.cli.training_run import TrainingProgressDisplay
from qkv.config import preset
from qkv.cost import estimate_run


@pytest.mark.parametrize(
    "settings", [{}, {"logits_to_keep": 19}, {"accumulation_steps": 3, "activation_checkpointing": True}]
)
def test_the_utilization_is_based_on_the_flops_of_the_estimate(capsys, settings):
    estimate = estimate_run(preset("bert-tiny"), batch_size=7, seq_len=128, steps=11, matmul_rate=1e12, **settings)
    ideal_seconds = estimate.flops / estimate.steps / 1e12
    with TrainingProgressDisplay(estimate) as progress:
        for step in (1, 2, 3):
            progress.report({"step": step, "loss": 1.5, "tokens": 896 * step, "seconds": 4 * ideal_seconds * step})
        progress.report({"step": 3, "validation_loss": 1.25, "is_best": True})
    output = capsys.readouterr().err
    assert "validation loss 1.2500 (best so far)" in output
    assert "25% of peak" in output


def test_a_new_number_of_steps_is_printed(capsys):
    estimate = estimate_run(preset("bert-tiny"), batch_size=7, seq_len=128, steps=11, matmul_rate=1e12)
    with TrainingProgressDisplay(estimate) as progress:
        progress.print_and_set_total_steps(1013)
        progress.print_and_set_total_steps(17)
    first, second = capsys.readouterr().err.splitlines()
    assert ("1,013" in first, "11" in first) == (True, True)
    assert ("17" in second, "1,013" in second) == (True, True)
