"""Time work on a device.

Each measurement returns the minimum or a low quantile of several runs because other processes can only slow the runs
down.
"""

import resource
import statistics
import time
from collections.abc import Callable

import torch

WorkFunction = Callable[[], object]
MAX_WARMUP_SECONDS = 1 / 3
MAX_EXTENSION = 4
"""Factor by which measurements may exceed their planned time in order to collect runs without interruptions."""
MAX_REPEATS = 32
"""Maximum number of calls in a CUDA graph. With this many calls, a kernel of 2 µs is timed to within about 1 %."""


class Timer:
    """A timer for latency and kernel time on a device.

    Each measurement takes about `seconds_per_measurement`.
    """

    def __init__(self, device: torch.device, *, seconds_per_measurement: float = 0.02) -> None:
        self.device = device
        self.is_gpu = device.type == "cuda"
        self.seconds_per_measurement = seconds_per_measurement
        # With a single thread, the process time excludes the time during which other processes use the core.
        self.now = time.process_time if not self.is_gpu and torch.get_num_threads() == 1 else time.perf_counter

    def synchronize(self) -> None:
        """Wait until a GPU has finished all queued work."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def measure_lower_quartile_latency(
        self, work: WorkFunction, *, seconds: float | None = None, is_warm: bool = False
    ) -> float:
        """Return the time from the call until the device has finished, as the lower quartile of several runs.

        On a CPU, runs that were interrupted by other processes are excluded if there are enough uninterrupted runs.
        """
        if not is_warm:
            self._warm_up(work)
        times, uninterrupted = [], []
        seconds = self.seconds_per_measurement if seconds is None else seconds
        started = self.now()
        while len(times) < 3 or (
            self._should_continue(self.now() - started, seconds, len(uninterrupted)) and len(times) < 200
        ):
            self.synchronize()
            interrupted, before = _n_preemptions(), self.now()
            work()
            self.synchronize()
            times.append(self.now() - before)
            if _n_preemptions() == interrupted:
                uninterrupted.append(times[-1])
        return statistics.quantiles(uninterrupted if len(uninterrupted) > 2 else times, n=4)[0]

    def _should_continue(self, spent: float, seconds: float, n_uninterrupted: int) -> bool:
        return spent < seconds or (
            self.now is time.perf_counter
            and not self.is_gpu
            and n_uninterrupted < 3
            and spent < MAX_EXTENSION * seconds
        )

    def _warm_up(self, work: WorkFunction) -> None:
        """Warm up with at least three calls and 20 ms because the first calls load and select kernels.

        For very long work, the warm-up ends after a third of a second.
        """
        started, calls = self.now(), 0
        while (
            calls < 3 or self.now() - started < self.seconds_per_measurement
        ) and self.now() - started < MAX_WARMUP_SECONDS:
            self.synchronize()
            work()
            calls += 1
        self.synchronize()

    def measure_kernel(self, work: WorkFunction, *, capture: bool = True) -> float:
        """Return only the time spent on the device.

        If `capture` is True, a GPU replays a CUDA graph to exclude the time for launches.
        """
        if not self.is_gpu:
            return self._min_seconds_on_cpu(work)
        # Only work that never synchronizes with the device can be captured.
        if capture and (replay := _capture_repeated(work, self._n_repeats(work))) is not None:
            graph, n = replay
            return self._measure_min_cuda_seconds(graph.replay) / n
        n = self._n_repeats(work)
        return self._measure_min_cuda_seconds(lambda: [work() for _ in range(n)]) / n

    def _min_seconds_on_cpu(self, work: WorkFunction) -> float:
        """Return the minimum time on a CPU.

        If a single call is too short to time, several calls are made between clock readings.
        """
        work()
        before = self.now()
        work()
        once = max(self.now() - before, 1e-7)
        n = max(1, min(100, int(self.seconds_per_measurement / 8 / once)))
        times = []
        for _ in range(5 if once < self.seconds_per_measurement else 1):
            before = self.now()
            for _ in range(n):
                work()
            times.append((self.now() - before) / n)
        return min(once, *times)

    def _n_repeats(self, work: WorkFunction) -> int:
        """Return how many calls take about 0.5 ms, up to MAX_REPEATS."""
        work()
        return max(1, min(MAX_REPEATS, int(0.0005 / max(self._measure_min_cuda_seconds(work), 1e-7))))

    def _measure_min_cuda_seconds(self, work: WorkFunction) -> float:
        """Measure the GPU time between two CUDA events and return the minimum of four runs."""
        work()
        times = []
        for _ in range(4):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.synchronize()
            start.record()
            work()
            end.record()
            self.synchronize()
            times.append(start.elapsed_time(end) / 1000)
        return min(times)


def _n_preemptions() -> int:
    """Return how often the scheduler has preempted this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _capture_repeated(work: WorkFunction, n: int) -> tuple["torch.cuda.CUDAGraph", int] | None:
    """Capture n calls of the work in a CUDA graph, or return None if the work cannot be captured.

    The capture is started and ended explicitly. The context manager in torch would empty the allocator cache each time,
    which takes longer than everything else.
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
