"""What did a GPU really run in a step? For the study of a prediction that was wrong."""

import time
import warnings
from collections import defaultdict
from typing import Any

import torch

from qkv.training.measuring import Step

WARM_UP = 3


def kernels_of(step: Step) -> dict[str, Any]:
    """The device's kernels of one step by name, and how long the CPU took to start them all."""
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    before = time.perf_counter()
    step()
    starting = time.perf_counter() - before
    torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's own
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    for event in profile.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            found[event.name()][0] += 1
            found[event.name()][1] += event.duration_ns() / 1e6
    longest = sorted(found.items(), key=lambda item: -item[1][1])
    return {
        "starting_ms": 1000 * starting,
        "kernels_ms": sum(ms for _, ms in found.values()),
        "n_kernels": sum(n for n, _ in found.values()),
        "kernels": [[name[:160], n, ms] for name, (n, ms) in longest],
    }
