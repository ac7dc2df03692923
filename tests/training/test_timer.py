"""Tests for the timer and for retaining freed memory."""

import subprocess
import sys

import torch

from qkv.training import timer
from qkv.training.timer import Timer

PROGRAM = """
import ctypes, resource
from qkv.cli.process import retain_freed_memory
assert retain_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(80 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


def test_interrupted_runs_are_excluded_if_others_were_not_interrupted(monkeypatch):
    """Every second run takes 9 s and is interrupted. The others take 1 s."""
    state = {"now": 0.0, "runs": 0, "preemptions": 0}
    monkeypatch.setattr(timer, "_n_preemptions", lambda: state["preemptions"])
    cpu_timer = Timer(torch.device("cpu"), seconds_per_measurement=0.0)
    cpu_timer.now = lambda: state["now"]

    def work():
        is_interrupted = state["runs"] % 2
        state["runs"] += 1
        state["preemptions"] += is_interrupted
        state["now"] += 9.0 if is_interrupted else 1.0

    assert cpu_timer.measure_lower_quartile_latency(work, seconds=30.0) == 1.0


def test_freed_memory_is_retained():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1000  # of 20,480 pages
