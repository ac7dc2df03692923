"""The learning rate of each step, a pure function of the step."""

import math

from qkv.choices import ScheduleKind
from qkv.config import TrainingConfig


def learning_rate(config: TrainingConfig, step: int) -> float:
    """For update number `step`, counted from 0."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    lowest = config.final_learning_rate
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    match config.schedule:
        case ScheduleKind.CONSTANT:
            share = 1.0
        case ScheduleKind.COSINE:
            share = lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * progress))
        case ScheduleKind.LINEAR:
            share = lowest + (1 - lowest) * (1 - progress)
        case ScheduleKind.WSD:
            left = (1 - progress) / config.decay_share
            share = lowest + (1 - lowest) * min(1.0, left)
        case ScheduleKind.NOAM:
            share = math.sqrt(max(1, config.warmup_steps) / (step + 1))
    return config.learning_rate * share
