"""Wait for a condition with a timeout."""

import time
from collections.abc import Callable

DEFAULT_TIMEOUT = 120.0
"""Timeout in seconds. It only prevents hangs and is far longer than even a loaded machine needs."""


def wait_until(condition: Callable[[], bool], description: str, *, seconds: float = DEFAULT_TIMEOUT) -> None:
    """Poll until the condition is true. The description is part of the error message after a timeout."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"condition still false after {seconds:g} seconds: {description}"
        time.sleep(0.01)
