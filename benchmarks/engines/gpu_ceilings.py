"""Measure the peak rates of the GPU: bfloat16 matmul FLOP/s and copy bandwidth."""

import torch

from benchmarks.engines.protocol import EngineRequest, EngineResponse, serve

SIDE = 8192
COPY_BYTES = 2**31


def measure(request: EngineRequest) -> EngineResponse:
    rates = {"flops": _flops(), "bytes": _bytes()}
    return {"ceilings": {str(threads): rates for threads in request["threads"]}}


def _flops() -> float:
    a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * SIDE**3 / _fastest(lambda: a @ b)


def _bytes() -> float:
    """Measure the copy bandwidth, counting both the bytes read and the bytes written per second."""
    x = torch.ones(COPY_BYTES, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 2 * COPY_BYTES / _fastest(lambda: y.copy_(x))


def _fastest(workload: object, *, n: int = 10) -> float:
    assert callable(workload)
    workload()
    seconds = []
    for _ in range(n):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        workload()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1000)
    return min(seconds)


if __name__ == "__main__":
    serve({"describe": lambda _: {"versions": {"torch": torch.__version__}}, "time": measure})
