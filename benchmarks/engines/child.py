"""Running a whole training command as a user would, and what it took."""

import resource
import subprocess
import time
from pathlib import Path


def run_to_end(command: list[str], *, cwd: Path) -> dict[str, float]:
    """Wall and CPU seconds (user and system) of the process with all that it starts."""
    before, started = _cpu(), time.perf_counter()
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or "it said nothing").splitlines()[-1]
        raise RuntimeError(f"ended with status {done.returncode}: {last}")
    return {"wall": time.perf_counter() - started, "cpu": _cpu() - before}


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
