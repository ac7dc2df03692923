"""What a GPU itself can do: bfloat16 matrix products and memory copies."""

from collections.abc import Callable

import torch

from benchmarks.engines.speaking import Answer, Question, Stopwatch, serve

SIDE = 8192
COPY_BYTES = 4 * 2**30
N = 20


def measure(question: Question) -> Answer:
    """The same under every number of threads that is asked for: they are the CPU's."""
    a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(COPY_BYTES, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    rate = {
        "flops": 2 * SIDE**3 / _seconds(lambda: a @ b),
        "bytes": 2 * COPY_BYTES / _seconds(lambda: target.copy_(source)),
    }
    del source, target
    torch.cuda.empty_cache()
    return {"ceilings": {str(threads): rate for threads in question["threads"]}}


def _seconds(work: Callable[[], object]) -> float:
    """Of one of N in a row: launching is not what is measured."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    watch = Stopwatch()
    for _ in range(N):
        work()
    torch.cuda.synchronize()
    return watch.read()["wall"] / N


if __name__ == "__main__":
    serve({"describe": lambda _: {"versions": {"torch": torch.__version__}}, "time": measure})
