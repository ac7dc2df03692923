"""What is disturbed does not count, and what was freed is kept."""

import subprocess
import sys

import torch

from qkv.training import timer
from qkv.training.timer import Timer

KEPT = """
import ctypes, resource
from qkv.training.timer import keep_freed_memory
assert keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(80 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


def test_runs_that_were_interrupted_do_not_count_where_others_were_not(monkeypatch):
    """Every second run takes 9 s and is interrupted; the others take 1 s."""
    state = {"now": 0.0, "runs": 0, "interruptions": 0}
    monkeypatch.setattr(timer, "_interruptions", lambda: state["interruptions"])
    timer = Timer(torch.device("cpu"), seconds=0.0)
    timer.now = lambda: state["now"]

    def work():
        is_late = state["runs"] % 2
        state["runs"] += 1
        state["interruptions"] += is_late
        state["now"] += 9.0 if is_late else 1.0

    assert timer.measure_latency(work, seconds=30.0) == 1.0


def test_freed_memory_is_kept():
    done = subprocess.run([sys.executable, "-c", KEPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1000  # of 20,480 pages
