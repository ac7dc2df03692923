"""Learning-rate schedules."""

import math

from qkv.choices import ScheduleKind
from qkv.config import TrainingConfig


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Return the learning rate of update `step` (starting at 0), which depends only on the config and the step."""
    progress = _decay_fraction_across_replans(config, step)
    is_warmed_up = step >= config.warmup_steps
    peak = config.learning_rate if is_warmed_up else config.learning_rate * (step + 1) / config.warmup_steps
    if not is_warmed_up and progress == 0:
        return peak
    minimum = config.min_lr_ratio
    match config.schedule:
        case ScheduleKind.CONSTANT:
            factor = 1.0
        case ScheduleKind.COSINE:
            factor = minimum + (1 - minimum) * 0.5 * (1 + math.cos(math.pi * progress))
        case ScheduleKind.LINEAR:
            factor = minimum + (1 - minimum) * (1 - progress)
        case ScheduleKind.WSD:
            remaining = (1 - progress) / config.decay_fraction
            factor = minimum + (1 - minimum) * min(1.0, remaining)
        case ScheduleKind.NOAM:
            factor = min(1.0, math.sqrt(max(1, config.warmup_steps) / (step + 1)))
    return peak * factor


def _decay_fraction_across_replans(config: TrainingConfig, step: int) -> float:
    """Return the fraction of the decay that is complete at `step`. The decay starts after the warm-up.

    If the number of steps was changed during the run (`config.replans`), the remaining decay is spread evenly over the
    remaining steps. This also applies during the warm-up, which may be longer than the replanned run.
    """
    done, start = 0.0, config.warmup_steps
    for at, steps in (*config.replans, (step, config.steps)):
        end = min(at, step)
        done += (1 - done) * max(0, end - start) / max(1, steps - start)
        start = end
    return done
