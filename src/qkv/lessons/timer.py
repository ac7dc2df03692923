"""How long does a small computation take here?"""

import time
from collections.abc import Callable


def best_of_n_seconds(work: Callable[[], object], *, times: int = 5) -> float:
    """The best of several: others on the machine can only make it slower."""
    taken = []
    for _ in range(times):
        before = time.perf_counter()
        work()
        taken.append(time.perf_counter() - before)
    return min(taken)
