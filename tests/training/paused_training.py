"""Run `qkv` and wait for a signal before a step. Usage: `paused_training.py STEP ARGUMENTS…`."""

import os
import signal
import sys
import time

from qkv.cli import main
from qkv.training.step import EagerStep

TIMEOUT = 240.0
"""Timeout in seconds, only a guard against hangs."""


def pause_before(step: int) -> None:
    original = EagerStep.compute_gradients

    def pause_and_compute(train_step, batch, number):
        deadline = time.monotonic() + TIMEOUT
        # The handler of the first signal restores the default handlers, which is how we notice the signal here.
        while number == step and time.monotonic() < deadline and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            time.sleep(0.01)
        return original(train_step, batch, number)

    EagerStep.compute_gradients = pause_and_compute


if __name__ == "__main__":
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        pause_before(int(sys.argv[1]))
    del sys.argv[1]
    main()
