"""Profile the GPU kernels of a step to analyze inaccurate predictions."""

import time
import warnings
from collections import defaultdict
from typing import Any

import torch

from qkv.training.benchmark_steps import Step

WARM_UP = 3


def profile_kernels(step: Step) -> dict[str, Any]:
    """Return the kernels of one step, keyed by name, and the time that the CPU takes to launch them."""
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    before = time.perf_counter()
    step()
    launch_seconds = time.perf_counter() - before
    torch.cuda.synchronize()
    kernels: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler prints warnings
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    for event in profile.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            kernels[event.name()][0] += 1
            kernels[event.name()][1] += event.duration_ns() / 1e6
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])
    return {
        "launch_ms": 1000 * launch_seconds,
        "kernels_ms": sum(ms for _, ms in kernels.values()),
        "n_kernels": sum(n for n, _ in kernels.values()),
        "kernels": [[name[:160], n, ms] for name, (n, ms) in longest],
    }
