"""Being asked to stop: the first signal ends the run after its step, a second one at once."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Which signal came, if one did."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @property
    def exit_code(self) -> int:
        """130 for Ctrl-C, 143 for SIGTERM, as shells count."""
        return 0 if self.signal is None else 128 + self.signal

    def receive(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = signal.Signals(number)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Catch SIGINT and SIGTERM inside the `with`; afterwards they do what they did before."""
    request = StopRequest()
    caught = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, request.receive) for number in caught}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
