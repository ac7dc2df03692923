"""The learning rate of each step: up, then down as the schedule says."""

import pytest

from qkv.choices import ScheduleKind
from qkv.config import TrainingConfig
from qkv.errors import ConfigError
from qkv.training.schedule import learning_rate


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
def test_they_end_at_the_final_share(schedule):
    assert rates(schedule)[101] == pytest.approx(0.05)
    assert rates(schedule, min_lr_ratio=0.0)[101] == pytest.approx(0.0)


def test_half_way_down():
    assert rates(ScheduleKind.COSINE)[56] == pytest.approx(0.5 * (0.1 + 0.9 * 0.5))
    assert rates(ScheduleKind.LINEAR)[56] == pytest.approx(0.5 * (0.1 + 0.9 * 0.5))
    assert rates(ScheduleKind.CONSTANT)[101] == 0.5


def test_wsd_stays_up_until_its_last_share():
    rate = rates(ScheduleKind.WSD, decay_fraction=0.2)
    assert rate[11:83] == [0.5] * 72
    assert rate[84] < 0.5
    assert rate[92] == pytest.approx(0.5 * (0.1 + 0.9 * 0.5))


def test_no_warm_up_begins_at_the_top():
    assert rates(ScheduleKind.LINEAR, warmup_steps=0)[0] == 0.5


def test_noam_is_the_papers_scaled_to_its_peak():
    rate, warmup = rates(ScheduleKind.NOAM), 11
    paper = [min((s + 1) ** -0.5, (s + 1) * warmup**-1.5) for s in range(len(rate))]
    assert rate == pytest.approx([0.5 * p / max(paper) for p in paper])


@pytest.mark.parametrize("schedule", [ScheduleKind.COSINE, ScheduleKind.LINEAR, ScheduleKind.WSD])
def test_where_the_last_step_moves_the_rate_goes_on_from_where_it_stood(schedule):
    plain = rates(schedule)
    for steps in (73, 211):
        moved = rates(schedule, steps=steps, replan_config=((53, 101),))
        assert moved[:54] == plain[:54]
        assert abs(moved[54] - moved[53]) < 0.03
        assert moved[11:] == sorted(moved[11:], reverse=True)
        assert moved[steps] == pytest.approx(0.05)


def test_a_last_step_may_move_more_than_once():
    twice = rates(ScheduleKind.LINEAR, min_lr_ratio=0.0, replan_config=((31, 51), (61, 91)))
    # At 31 half of the way is gone; from there 30 of 60 steps are half of the rest; from 61 on, 40 steps are left.
    assert [twice[31], twice[61], twice[81]] == pytest.approx([0.25, 0.125, 0.0625])


def test_a_last_step_that_moves_into_the_warm_up_lets_the_rate_come_down_all_the_same():
    rate = rates(ScheduleKind.LINEAR, min_lr_ratio=0.0, warmup_steps=31, steps=23, replan_config=((7, 101),))
    assert rate[:8] == rates(ScheduleKind.LINEAR, warmup_steps=31)[:8]
    assert rate[15] == pytest.approx(0.5 * 16 / 31 / 2)
    assert rate[23] == 0


def test_a_plan_that_was_left_after_the_end_is_refused():
    with pytest.raises(ConfigError, match=r"replanned=\[\[53, 101\]\] has a step that is not before steps=53"):
        TrainingConfig(batch_size=1, seq_len=1, steps=53, warmup_steps=1, replans=((53, 101),))
