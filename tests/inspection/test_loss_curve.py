"""The loss curve shows every step, the evaluations and the best checkpoint."""

import json

import pytest

from qkv.errors import InputError
from qkv.inspection.figures import plot_loss_curve


def test_steps_and_evaluations_are_plotted(tmp_path):
    lines = [{"step": step, "loss": 4.0 - step / 50} for step in range(1, 101)]
    lines += [{"step": 50, "validation_loss": 3.5}, {"step": 100, "validation_loss": 2.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (axis,) = plot_loss_curve(tmp_path / "metrics.jsonl").axes
    raw, smooth, held_out, _ = axis.lines
    assert list(raw.get_xdata()) == list(range(1, 101))
    assert raw.get_ydata()[-1] == 2.0
    assert 2.0 < smooth.get_ydata()[-1] < 2.2
    assert list(held_out.get_ydata()) == [3.5, 2.5]
    assert [text.get_text() for text in axis.get_legend().texts] == [
        "training",
        "validation",
        "best: 2.500 at step 100",
    ]


def test_the_selected_checkpoint_is_marked_even_if_its_loss_is_not_the_lowest(tmp_path):
    lines = [{"step": step, "loss": 4.0} for step in range(1, 31)]
    lines += [{"step": 10 * i, "validation_loss": loss, "is_best": i < 3} for i, loss in ((1, 2.0), (2, 3.0), (3, 4.0))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (axis,) = plot_loss_curve(tmp_path / "metrics.jsonl").axes
    assert axis.get_legend().texts[-1].get_text().endswith(": 3.000 at step 20")
    assert axis.lines[-1].get_xdata() == [20]


def test_the_smoothed_line_follows_a_steep_start(tmp_path):
    lines = [{"step": step, "loss": 1 + 9 * 0.99**step} for step in range(1, 10_001)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (axis,) = plot_loss_curve(tmp_path / "metrics.jsonl").axes
    raw, smooth, *_ = axis.lines
    assert smooth.get_ydata()[600] < 1.5 + raw.get_ydata()[600]


def test_a_run_without_steps_raises(tmp_path):
    with pytest.raises(InputError, match=r"metrics\.jsonl: "):
        plot_loss_curve(tmp_path / "metrics.jsonl")


def test_the_training_loss_is_plotted_without_label_smoothing(tmp_path):
    lines = [{"step": step, "loss": 3.0, "unsmoothed_loss": 1.0} for step in range(1, 31)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (axis,) = plot_loss_curve(tmp_path / "metrics.jsonl").axes
    assert set(axis.lines[0].get_ydata()) == {1.0}
