"""Being asked to stop: in the loop the first signal ends the run after its step, elsewhere at once.

Exit codes are those that shells give: 130 for Ctrl-C (SIGINT), 143 for SIGTERM. A second signal always leaves at once.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

CAUGHT = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """Raised by a signal that comes where there is no step to finish."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        super().__init__(self.signal.name)


class StopRequest:
    """Which signal came, if one did."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def receive(self, number: int, _frame: FrameType | None) -> None:
        _next_one_kills()
        self.signal = signal.Signals(number)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Inside the `with`, a signal is noted and nothing else."""
    request = StopRequest()
    with _handled_by(request.receive):
        yield request


@contextmanager
def stop_at_once() -> Iterator[None]:
    """Inside the `with`, a signal raises `Stopped`."""

    def receive(number: int, _frame: FrameType | None) -> None:
        _next_one_kills()
        raise Stopped(number)

    with _handled_by(receive):
        yield


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in CAUGHT}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def _next_one_kills() -> None:
    # By the system itself, so that it works even while Python waits for a long operation.
    for number in CAUGHT:
        signal.signal(number, signal.SIG_DFL)
