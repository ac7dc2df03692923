"""Adjust the number of steps to a time budget while the run is in progress."""

import time
from collections.abc import Callable

from qkv.config import TrainingConfig
from qkv.training.distributed import Distributed
from qkv.training.recipe_selection import MIN_STEPS, steps_in_budget
from qkv.training.run_folder import TrainingProgress

REPLANS_PER_RUN = 10
"""Number of times that the number of steps is recalculated in a run with constant throughput."""
REPLAN_TOLERANCE = 0.1
"""Minimum relative difference for changing the number of steps."""


class TimeBudgetReplanner:
    """A replanner that adjusts the number of steps so that the run takes `seconds` from now.

    A new number of steps takes effect at a checkpoint, and `on_replan` must save the new config before the next step.
    The saved recipe therefore always matches the training, and a resumed run gives the same results.
    """

    def __init__(
        self,
        seconds: float,
        *,
        on_replan: Callable[[TrainingConfig], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.on_replan = on_replan
        self._seconds = seconds
        self._clock = clock
        self._started = self._last_replan = clock()
        self._reference: TrainingProgress | None = None

    def replan(
        self, config: TrainingConfig, progress: TrainingProgress, distributed: Distributed
    ) -> TrainingConfig | None:
        """Return a config with a new number of steps, or None if the number does not change.

        Rank 0 measures the time.
        """
        steps = int(distributed.broadcast_from_rank0(lambda: self._replan_total_steps(config, progress)))
        return None if steps == config.steps else record_replan(config, at_step=progress.step, steps=steps)

    def _replan_total_steps(self, config: TrainingConfig, progress: TrainingProgress) -> int:
        if self._reference is None:
            # The first step is not timed because it also allocates memory and compiles.
            self._reference = progress if progress.step else None
            return config.steps
        n_steps, now = progress.step - self._reference.step, self._clock()
        is_due = n_steps >= config.steps / REPLANS_PER_RUN or now - self._last_replan >= self._seconds / REPLANS_PER_RUN
        if n_steps == 0 or not is_due or progress.step >= config.steps:
            return config.steps
        seconds_per_step = (progress.seconds - self._reference.seconds) / n_steps
        self._reference, self._last_replan = progress, now
        n_affordable = (self._seconds - (now - self._started)) / max(seconds_per_step, 1e-9)
        remaining = steps_in_budget(n_affordable, n_evaluations=(config.steps - progress.step) // config.eval_every + 1)
        steps = max(progress.step + max(1, remaining), MIN_STEPS)
        return steps if abs(steps - config.steps) > REPLAN_TOLERANCE * config.steps else config.steps


def record_replan(config: TrainingConfig, *, at_step: int, steps: int) -> TrainingConfig:
    """Return the config with a new number of steps that takes effect at step `at_step`.

    Evaluations may become less frequent, but never more frequent.
    """
    eval_every = max(config.eval_every, steps // 10)
    return config.replace(
        steps=steps,
        replans=(*config.replans, (at_step, config.steps)),
        eval_every=eval_every,
        save_every=max(config.save_every, eval_every),
    )
