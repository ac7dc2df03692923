"""Prepare batches in background threads."""

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def prefetch(
    batch: Callable[[int], T], start: int, *, stop: int | None = None, n_ahead: int = 2, n_workers: int = 1
) -> Generator[T, None, None]:
    """Yield batch(start), batch(start + 1), … in order, with worker threads computing the batches in advance.

    If a worker raises an exception, the exception is re-raised when the affected batch is requested. Each batch is a
    pure function of its number, so the result does not depend on the number of workers.
    """
    waiting: deque[Future[T]] = deque()
    number = start
    with ThreadPoolExecutor(n_workers, thread_name_prefix="prefetch") as pool:
        try:
            while True:
                while len(waiting) < n_ahead + 1 and (stop is None or number < stop):
                    waiting.append(pool.submit(batch, number))
                    number += 1
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
