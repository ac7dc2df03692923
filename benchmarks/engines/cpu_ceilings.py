"""Measure the peak rates of the CPU: matmul FLOP/s and memory bandwidth."""

from collections.abc import Callable

import torch

from benchmarks.engines.protocol import ElapsedTimer, EngineRequest, EngineResponse, serve

SIDE = 1024
READ_BYTES = 512 * 2**20
"""Number of bytes to read, which is much larger than any cache."""


def measure(request: EngineRequest) -> EngineResponse:
    rates = {}
    for threads in request["threads"]:
        torch.set_num_threads(threads)
        rates[str(threads)] = {"flops": _flops(), "bytes": _bytes()}
    return {"ceilings": rates}


def _flops() -> float:
    a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    return 2 * SIDE**3 / _fastest(lambda: a @ b, n=6)


def _bytes() -> float:
    x = torch.ones(READ_BYTES // 4)
    return READ_BYTES / _fastest(x.sum, n=4)


def _fastest(workload: Callable[[], object], *, n: int) -> float:
    workload()
    seconds = []
    for _ in range(n):
        timer = ElapsedTimer()
        workload()
        seconds.append(timer.elapsed()["wall"])
    return min(seconds)


if __name__ == "__main__":
    serve({"describe": lambda _: {"versions": {"torch": torch.__version__}}, "time": measure})
