"""Handle SIGINT and SIGTERM.

Inside the training loop, the first signal ends the run after the current step. Outside the training loop, it raises
`SignalInterrupt`. A second signal always kills the process. Exit codes follow the shell convention: 130 for SIGINT
(Ctrl-C) and 143 for SIGTERM.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class SignalInterrupt(KeyboardInterrupt):
    """Raised when a stop signal arrives outside the training loop."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        super().__init__(self.signal.name)


class StopRequest:
    """A record of the stop signal that was received, if any."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def receive(self, number: int, _frame: FrameType | None) -> None:
        _restore_default_handlers()
        self.signal = signal.Signals(number)


@contextmanager
def record_stop_signals() -> Iterator[StopRequest]:
    """Record stop signals in the yielded `StopRequest` while the context is active.

    The signals have no other effect.
    """
    request = StopRequest()
    with _temporary_stop_signal_handler(request.receive):
        yield request


@contextmanager
def raise_on_stop_signals() -> Iterator[None]:
    """Raise `SignalInterrupt` when a stop signal arrives while the context is active."""

    def receive(number: int, _frame: FrameType | None) -> None:
        _restore_default_handlers()
        raise SignalInterrupt(number)

    with _temporary_stop_signal_handler(receive):
        yield


@contextmanager
def _temporary_stop_signal_handler(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    previous = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, old_handler in previous.items():
            signal.signal(number, old_handler)


def _restore_default_handlers() -> None:
    # The operating system's default handler works even during a long native call.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
