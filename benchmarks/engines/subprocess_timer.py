"""Run a training command as a subprocess and measure its time."""

import resource
import subprocess
import time
from pathlib import Path


def run_and_time(command: list[str], *, cwd: Path) -> dict[str, float]:
    """Run a command and return its wall-clock and CPU seconds (user and system), including child processes."""
    before, started = _cpu(), time.perf_counter()
    process = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if process.returncode:
        last = (process.stderr.strip() or "no error output").splitlines()[-1]
        raise RuntimeError(f"exited with status {process.returncode}: {last}")
    return {"wall": time.perf_counter() - started, "cpu": _cpu() - before}


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
