"""Whose turn it is with a model, and leaving the queue once nobody waits for the answer."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event, RLock
from types import TracebackType

from qkv.serving.responses import RefusedError

N_THREADS = 8
"""Requests that are worked at at once; most of them wait for a model's lock, and torch has threads of its own."""
POLL = 0.2
"""Seconds after which a request that was given up is noticed in the queue."""
_given_up: ContextVar[Event | None] = ContextVar("given_up", default=None)


@contextmanager
def for_client(given_up: Event) -> Iterator[None]:
    """Inside the `with`, this thread works for a request that is given up when the event is set."""
    before = _given_up.set(given_up)
    try:
        yield
    finally:
        _given_up.reset(before)


class Turn:
    """A lock that one thread may take several times over; whoever was given up gets no turn any more.

    A pass that has begun is finished: torch cannot be stopped inside it.
    """

    def __init__(self) -> None:
        self._lock = RLock()

    def acquire(self) -> None:
        while not self._lock.acquire(timeout=POLL):
            _check()
        try:
            _check()
        except RefusedError:
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


def is_given_up() -> bool:
    """Whether nobody waits any more for what this thread works at."""
    event = _given_up.get()
    return event is not None and event.is_set()


def _check() -> None:
    if is_given_up():
        raise RefusedError(499, "nobody waits for this answer any more")
