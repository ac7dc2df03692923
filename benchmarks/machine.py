"""On what it was measured: the processor, how many cores, how busy. No names of machines or folders."""

import os
import platform
from pathlib import Path

from qkv.data.prepare import n_cores


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


def others_load() -> float:
    """Processes that wanted to run in the last minute; taken before a benchmark starts, they are others'."""
    return os.getloadavg()[0]


def load_remark(load: float) -> str:
    if load < 0.5:
        return f"quiet before the run (load {load:.1f})"
    return f"busy before the run (load {load:.1f} on {n_cores()} cores): wall times are too long, CPU times nearer"
