"""What the machine itself can do: matrix products and memory reads, for given numbers of threads."""

from collections.abc import Callable

import torch

from benchmarks.engines.speaking import Answer, Question, Stopwatch, serve

SIDE = 1024
READ_BYTES = 512 * 2**20
"""Far more than any cache holds."""


def measure(question: Question) -> Answer:
    rates = {}
    for threads in question["threads"]:
        torch.set_num_threads(threads)
        rates[str(threads)] = {"flops": _flops(), "bytes": _bytes()}
    return {"ceilings": rates}


def _flops() -> float:
    a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    return 2 * SIDE**3 / _best(lambda: a @ b, n=6)


def _bytes() -> float:
    x = torch.ones(READ_BYTES // 4)
    return READ_BYTES / _best(x.sum, n=4)


def _best(work: Callable[[], object], *, n: int) -> float:
    work()
    seconds = []
    for _ in range(n):
        watch = Stopwatch()
        work()
        seconds.append(watch.read()["wall"])
    return min(seconds)


if __name__ == "__main__":
    serve({"describe": lambda _: {"versions": {"torch": torch.__version__}}, "time": measure})
