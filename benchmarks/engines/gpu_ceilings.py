"""What the GPU itself can do: matrix products in bfloat16, and copies."""

import torch

from benchmarks.engines.speaking import Answer, Question, serve

SIDE = 8192
COPY_BYTES = 2**31


def measure(question: Question) -> Answer:
    rates = {"flops": _flops(), "bytes": _bytes()}
    return {"ceilings": {str(threads): rates for threads in question["threads"]}}


def _flops() -> float:
    a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * SIDE**3 / _best(lambda: a @ b)


def _bytes() -> float:
    """Read and written."""
    x = torch.ones(COPY_BYTES, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 2 * COPY_BYTES / _best(lambda: y.copy_(x))


def _best(work: object, *, n: int = 10) -> float:
    assert callable(work)
    work()
    seconds = []
    for _ in range(n):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1000)
    return min(seconds)


if __name__ == "__main__":
    serve({"describe": lambda _: {"versions": {"torch": torch.__version__}}, "time": measure})
