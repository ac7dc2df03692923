"""The learning rate of each step, a pure function of the step."""

import math

from qkv.choices import ScheduleKind
from qkv.config import TrainingConfig


def learning_rate(config: TrainingConfig, step: int) -> float:
    """For update number `step`, counted from 0."""
    progress = _way(config, step)
    is_warm = step >= config.warmup_steps
    highest = config.learning_rate if is_warm else config.learning_rate * (step + 1) / config.warmup_steps
    if not is_warm and progress == 0:
        return highest
    lowest = config.min_lr_ratio
    match config.schedule:
        case ScheduleKind.CONSTANT:
            share = 1.0
        case ScheduleKind.COSINE:
            share = lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * progress))
        case ScheduleKind.LINEAR:
            share = lowest + (1 - lowest) * (1 - progress)
        case ScheduleKind.WSD:
            left = (1 - progress) / config.decay_fraction
            share = lowest + (1 - lowest) * min(1.0, left)
        case ScheduleKind.NOAM:
            share = min(1.0, math.sqrt(max(1, config.warmup_steps) / (step + 1)))
    return highest * share


def _way(config: TrainingConfig, step: int) -> float:
    """The share of the way down that is done at `step`; it begins after the warm-up and is even.

    Where the last step was moved, what is left of the way is shared out among the steps that are left; in the warm-up,
    too, which may be longer than the time.
    """
    done, start = 0.0, config.warmup_steps
    for at, steps in (*config.replans, (step, config.steps)):
        until = min(at, step)
        done += (1 - done) * max(0, until - start) / max(1, steps - start)
        start = until
    return done
