"""`paused.py STEP ARGUMENTS…`: run `qkv` with these arguments; it waits for a signal before the step."""

import os
import signal
import sys
import time

from qkv.cli import main
from qkv.training import Trainer

PATIENCE = 240.0
"""Seconds; a guard against a hang only."""


def pause_before(step: int) -> None:
    gradients = Trainer._gradients

    def paused(trainer, batch, number):
        until = time.monotonic() + PATIENCE
        # The first signal is noted by a handler, which leaves the next one to the system.
        while number == step and time.monotonic() < until and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            time.sleep(0.01)
        return gradients(trainer, batch, number)

    Trainer._gradients = paused


if __name__ == "__main__":
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        pause_before(int(sys.argv[1]))
    del sys.argv[1]
    main()
