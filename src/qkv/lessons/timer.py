"""Measure the run time of a small computation."""

import time
from collections.abc import Callable


def best_of_n_seconds(work: Callable[[], object], *, times: int = 5) -> float:
    """Call `work` several times and return the shortest run time in seconds.

    The shortest run time is the most accurate because other programs can only slow down the computation.
    """
    durations = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        durations.append(time.perf_counter() - start)
    return min(durations)
