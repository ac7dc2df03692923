"""How many steps fit in the time that was given? Asked again as the run goes: a machine is not always as busy."""

import time
from collections.abc import Callable

from qkv.config import TrainingConfig
from qkv.training.choosing import FEWEST_STEPS, steps_within
from qkv.training.ranks import Ranks
from qkv.training.run import Progress

LOOKS = 10
"""So often a steady run is looked at."""
SLACK = 0.1
"""A last step that would move by a smaller share of the steps stays where it is."""


class Pace:
    """A clock beside a run that is to take `seconds` from now.

    Where the last step falls is the clock's; the numbers are not: a new plan begins at a checkpoint, and `keep` writes
    it down before the next step. What the recipe then says is what was trained, and is trained again by a resumed run.
    """

    def __init__(
        self,
        seconds: float,
        *,
        keep: Callable[[TrainingConfig], None],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.keep = keep
        self._seconds = seconds
        self._now = now
        self._started = self._looked = now()
        self._seen: Progress | None = None

    def plan(self, config: TrainingConfig, progress: Progress, ranks: Ranks) -> TrainingConfig | None:
        """None: all stays as it is. The first process's clock counts."""
        steps = int(ranks.of_first(lambda: self._last_step(config, progress)))
        return None if steps == config.steps else replanned(config, at=progress.step, steps=steps)

    def _last_step(self, config: TrainingConfig, progress: Progress) -> int:
        if self._seen is None:
            # The first step also allocates and compiles.
            self._seen = progress if progress.step else None
            return config.steps
        n_steps, now = progress.step - self._seen.step, self._now()
        is_due = n_steps >= config.steps / LOOKS or now - self._looked >= self._seconds / LOOKS
        if n_steps == 0 or not is_due or progress.step >= config.steps:
            return config.steps
        a_step = (progress.seconds - self._seen.seconds) / n_steps
        self._seen, self._looked = progress, now
        room = (self._seconds - (now - self._started)) / max(a_step, 1e-9)
        left = steps_within(room, n_evaluations=(config.steps - progress.step) // config.eval_every + 1)
        steps = max(progress.step + max(1, left), FEWEST_STEPS)
        return steps if abs(steps - config.steps) > SLACK * config.steps else config.steps


def replanned(config: TrainingConfig, *, at: int, steps: int) -> TrainingConfig:
    """From step `at` on the run is to end at `steps`. Evaluations become rarer with more steps, never denser."""
    every = max(config.eval_every, steps // 10)
    return config.replace(
        steps=steps,
        replans=(*config.replans, (at, config.steps)),
        eval_every=every,
        save_every=max(config.save_every, every),
    )
