"""Waiting for something to come true, but not for ever."""

import time
from collections.abc import Callable

SECONDS = 120.0
"""A guard against a hang only: far longer than a loaded machine needs."""


def wait_until(holds: Callable[[], bool], what: str, *, seconds: float = SECONDS) -> None:
    """`what`: said where it does not come true in time."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, f"after {seconds:g} seconds still not so: {what}"
        time.sleep(0.01)
