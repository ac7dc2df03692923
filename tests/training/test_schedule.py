"""Tests for learning-rate schedules."""

import pytest

from qkv.choices import ScheduleKind
from qkv.config import TrainingConfig
from qkv.errors import ConfigError
from qkv.training.optimizer import learning_rate


def rates(schedule, **changes):
    settings = {"steps": 101, "warmup_steps": 11, "learning_rate": 0.5, "min_lr_ratio": 0.1} | changes
    config = TrainingConfig(batch_size=1, seq_len=1, schedule=schedule, **settings)
    return [learning_rate(config, step) for step in range(config.steps + 1)]


@pytest.mark.parametrize("schedule", list(ScheduleKind))
def test_every_schedule_warms_up_evenly_and_peaks_at_the_learning_rate(schedule):
    rate = rates(schedule)
    assert rate[:11] == pytest.approx([0.5 * (i + 1) / 11 for i in range(11)])
    assert max(rate) == pytest.approx(0.5)
    assert rate[11:] == sorted(rate[11:], reverse=True)


@pytest.mark.parametrize("schedule", [ScheduleKind.COSINE, ScheduleKind.LINEAR, ScheduleKind.WSD])
def test_schedules_end_at_the_minimum_ratio(schedule):
    assert rates(schedule)[101] == pytest.approx(0.05)
    assert rates(schedule, min_lr_ratio=0.0)[101] == pytest.approx(0.0)


def test_schedules_at_half_of_the_decay():
    assert rates(ScheduleKind.COSINE)[56] == pytest.approx(0.5 * (0.1 + 0.9 * 0.5))
    assert rates(ScheduleKind.LINEAR)[56] == pytest.approx(0.5 * (0.1 + 0.9 * 0.5))
    assert rates(ScheduleKind.CONSTANT)[101] == 0.5


def test_wsd_is_constant_until_its_decay_starts():
    rate = rates(ScheduleKind.WSD, decay_fraction=0.2)
    assert rate[11:83] == [0.5] * 72
    assert rate[84] < 0.5
    assert rate[92] == pytest.approx(0.5 * (0.1 + 0.9 * 0.5))


def test_without_warmup_the_first_step_has_the_peak_rate():
    assert rates(ScheduleKind.LINEAR, warmup_steps=0)[0] == 0.5


def test_noam_matches_the_paper_up_to_scale():
    rate, warmup = rates(ScheduleKind.NOAM), 11
    paper = [min((s + 1) ** -0.5, (s + 1) * warmup**-1.5) for s in range(len(rate))]
    assert rate == pytest.approx([0.5 * p / max(paper) for p in paper])


@pytest.mark.parametrize("schedule", [ScheduleKind.COSINE, ScheduleKind.LINEAR, ScheduleKind.WSD])
def test_after_a_replan_the_rate_continues_from_its_current_value(schedule):
    original = rates(schedule)
    for steps in (73, 211):
        replanned = rates(schedule, steps=steps, replans=((53, 101),))
        assert replanned[:54] == original[:54]
        assert abs(replanned[54] - replanned[53]) < 0.03
        assert replanned[11:] == sorted(replanned[11:], reverse=True)
        assert replanned[steps] == pytest.approx(0.05)


def test_a_run_can_be_replanned_more_than_once():
    twice = rates(ScheduleKind.LINEAR, min_lr_ratio=0.0, replans=((31, 51), (61, 91)))
    # At step 31 half of the decay is done. The next 30 of 60 steps are half of the rest. 40 steps remain from 61 on.
    assert [twice[31], twice[61], twice[81]] == pytest.approx([0.25, 0.125, 0.0625])


def test_a_replan_that_ends_during_warmup_still_decays_to_zero():
    rate = rates(ScheduleKind.LINEAR, min_lr_ratio=0.0, warmup_steps=31, steps=23, replans=((7, 101),))
    assert rate[:8] == rates(ScheduleKind.LINEAR, warmup_steps=31)[:8]
    assert rate[15] == pytest.approx(0.5 * 16 / 31 / 2)
    assert rate[23] == 0


def test_a_replan_after_the_last_step_raises_an_error():
    with pytest.raises(ConfigError, match=r"steps=53.*\[\[53, 101\]\]"):
        TrainingConfig(batch_size=1, seq_len=1, steps=53, warmup_steps=1, replans=((53, 101),))
