"""Locks that stop waiting when the current request is cancelled."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event, RLock
from types import TracebackType

from qkv.serving.responses import RequestError

N_WORKER_THREADS = 8
"""Number of requests processed concurrently. Most requests wait for a model's lock, and torch has its own threads."""
POLL_SECONDS = 0.2
"""Interval at which waiting requests check whether they were cancelled."""
_cancel_event: ContextVar[Event | None] = ContextVar("cancel_event", default=None)


@contextmanager
def cancellation_scope(cancel_event: Event) -> Iterator[None]:
    """Create a context in which this thread's work counts as cancelled once the event is set."""
    token = _cancel_event.set(cancel_event)
    try:
        yield
    finally:
        _cancel_event.reset(token)


class CancellableRLock:
    """A reentrant lock whose `acquire` raises `RequestError` if the current request has been cancelled.

    A forward pass that has started runs to completion because torch cannot interrupt it.
    """

    def __init__(self) -> None:
        self._lock = RLock()

    def acquire(self) -> None:
        while not self._lock.acquire(timeout=POLL_SECONDS):
            _raise_if_cancelled()
        try:
            _raise_if_cancelled()
        except RequestError:
            self._lock.release()
            raise

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def is_cancelled() -> bool:
    """Return whether the request that this thread is processing has been cancelled."""
    event = _cancel_event.get()
    return event is not None and event.is_set()


def _raise_if_cancelled() -> None:
    if is_cancelled():
        # nginx uses status 499 for clients that closed the connection.
        raise RequestError(499, "the client cancelled the request")
