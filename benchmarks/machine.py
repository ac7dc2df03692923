"""Describe the processor, cores and load of the machine. Host names and paths are never recorded."""

import os
import platform
from pathlib import Path

from qkv.data.token_store_writer import available_cores


def processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def gpu() -> str:
    import torch

    return torch.cuda.get_device_name()


def load_average() -> float:
    """Return the load average of the last minute. Before a benchmark starts, other processes cause this load."""
    return os.getloadavg()[0]


def describe_load(load: float) -> str:
    if load < 0.5:
        return f"idle before the run (load {load:.1f})"
    return (
        f"busy before the run (load {load:.1f} on {available_cores()} cores), so CPU times are more reliable than wall "
        "times"
    )
