"""The learning rate of each step: up, then down as the schedule says."""

import pytest

from qkv.choices import ScheduleKind
from qkv.config import TrainingConfig
from qkv.training.schedule import learning_rate


def rates(schedule, **changes):
    settings = {"steps": 101, "warmup_steps": 11, "learning_rate": 0.5, "final_learning_rate": 0.1} | changes
    config = TrainingConfig(batch_size=1, length=1, schedule=schedule, **settings)
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
    assert rates(schedule, final_learning_rate=0.0)[101] == pytest.approx(0.0)


def test_half_way_down():
    assert rates(ScheduleKind.COSINE)[56] == pytest.approx(0.5 * (0.1 + 0.9 * 0.5))
    assert rates(ScheduleKind.LINEAR)[56] == pytest.approx(0.5 * (0.1 + 0.9 * 0.5))
    assert rates(ScheduleKind.CONSTANT)[101] == 0.5


def test_wsd_stays_up_until_its_last_share():
    rate = rates(ScheduleKind.WSD, decay_share=0.2)
    assert rate[11:83] == [0.5] * 72
    assert rate[84] < 0.5
    assert rate[92] == pytest.approx(0.5 * (0.1 + 0.9 * 0.5))


def test_no_warm_up_begins_at_the_top():
    assert rates(ScheduleKind.LINEAR, warmup_steps=0)[0] == 0.5


def test_noam_is_the_papers_scaled_to_its_peak():
    rate, warmup = rates(ScheduleKind.NOAM), 11
    paper = [min((s + 1) ** -0.5, (s + 1) * warmup**-1.5) for s in range(len(rate))]
    assert rate == pytest.approx([0.5 * p / max(paper) for p in paper])
