"""How long does a piece of work take on a device? The best of several: others can only make it slower."""

import ctypes
import resource
import statistics
import time
from collections.abc import Callable

import torch

Work = Callable[[], object]
LONG = 1 / 3
"""Seconds."""
PATIENCE = 4
"""How many times as long as was meant to wait for runs that nothing else on the machine disturbed."""
REPEATS = 32
"""Most calls in a GPU's graph: a kernel of 2 µs is then timed to a hundredth."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of glibc's mallopt


def keep_freed_memory() -> bool:
    """Let this process keep memory that it has freed, up to 1 GiB a tensor; False where the C library cannot.

    glibc gives tensors of 32 MiB and more back to the system, or not, by the history of the process; the next one
    then takes a page fault for every 4 KiB, which doubles the time of plain attention at 2048 positions.
    """
    try:
        change = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(change(_MMAP_THRESHOLD, 2**30) and change(_TRIM_THRESHOLD, 2**31 - 1))


class Stopwatch:
    """`spend`: seconds to give to one measurement."""

    def __init__(self, device: torch.device, *, spend: float = 0.02) -> None:
        self.device = device
        self.is_gpu = device.type == "cuda"
        self.spend = spend
        # On one thread the process's own time is taken: what else runs on the machine does not lengthen it.
        self.now = time.process_time if not self.is_gpu and torch.get_num_threads() == 1 else time.perf_counter

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def whole(self, work: Work, *, spend: float | None = None, is_warm: bool = False) -> float:
        """From the call until the device is done: what a user waits. The lower quarter; on a CPU, of calm runs."""
        if not is_warm:
            self._warm_up(work)
        taken, calm = [], []
        spend = self.spend if spend is None else spend
        started = self.now()
        while len(taken) < 3 or (self._goes_on(self.now() - started, spend, len(calm)) and len(taken) < 200):
            self.wait()
            interrupted, before = _interruptions(), self.now()
            work()
            self.wait()
            taken.append(self.now() - before)
            if _interruptions() == interrupted:
                calm.append(taken[-1])
        return statistics.quantiles(calm if len(calm) > 2 else taken, n=4)[0]

    def _goes_on(self, spent: float, spend: float, n_calm: int) -> bool:
        return spent < spend or (
            self.now is time.perf_counter and not self.is_gpu and n_calm < 3 and spent < PATIENCE * spend
        )

    def _warm_up(self, work: Work) -> None:
        """Three calls and `spend` (20 ms) at least: the first ones load kernels and choose among them.

        Work so large that it takes a third of a second needs no more of them.
        """
        started, calls = self.now(), 0
        while (calls < 3 or self.now() - started < self.spend) and self.now() - started < LONG:
            self.wait()
            work()
            calls += 1
        self.wait()

    def kernel(self, work: Work, *, capture: bool = True) -> float:
        """The device's own time. `capture`: let a GPU replay its kernels, so that launching costs nothing."""
        if not self.is_gpu:
            return self._repeated(work)
        # A graph can only be made from work that never waits for the device.
        if capture and (replay := _captured(work, self._times(work))) is not None:
            graph, n = replay
            return self._events(graph.replay) / n
        n = self._times(work)
        return self._events(lambda: [work() for _ in range(n)]) / n

    def _repeated(self, work: Work) -> float:
        """On a CPU; several calls between two looks at the clock where one is too short for it."""
        work()
        before = self.now()
        work()
        once = max(self.now() - before, 1e-7)
        n = max(1, min(100, int(self.spend / 8 / once)))
        taken = []
        for _ in range(5 if once < self.spend else 1):
            before = self.now()
            for _ in range(n):
                work()
            taken.append((self.now() - before) / n)
        return min(once, *taken)

    def _times(self, work: Work) -> int:
        work()
        return max(1, min(REPEATS, int(0.0005 / max(self._events(work), 1e-7))))

    def _events(self, work: Work) -> float:
        work()
        taken = []
        for _ in range(4):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.wait()
            start.record()
            work()
            end.record()
            self.wait()
            taken.append(start.elapsed_time(end) / 1000)
        return min(taken)


def _interruptions() -> int:
    """How often another process has been given a core that this one was using."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _captured(work: Work, n: int) -> tuple["torch.cuda.CUDAGraph", int] | None:
    """The work's kernels, n times, as a graph; None where it cannot be captured.

    Begun and ended by hand: torch's own context empties the allocator's cache each time, which takes longer than all
    the rest.
    """
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            for _ in range(2):
                work()
            torch.cuda.synchronize()
            graph.capture_begin()
            try:
                for _ in range(n):
                    work()
            finally:
                graph.capture_end()
    except RuntimeError:
        return None
    torch.cuda.current_stream().wait_stream(side)
    return graph, n
