"""Capture training steps in CUDA graphs and replay them.

A step of a small model runs thousands of kernels. Each kernel runs for only a few microseconds, which is less than the
time to launch it. Replaying a captured graph requires only a single launch.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
StepInputs = tuple[Tensor | None, ...]
"""The tensors that a step reads."""
WARMUP_STEPS = 2
"""Number of eager steps before the capture. They perform one-time work: compilation, kernel selection and optimizer
state allocation."""


class CUDAGraphStep(Generic[T]):
    """A training step that runs eagerly at first and is captured in a CUDA graph once the input shapes repeat.

    The step is captured at the third consecutive call with the same shapes. Steps with other input shapes run eagerly.
    The returned tensors are overwritten by the next call.
    """

    def __init__(self, capture: Callable[[Callable[[], T]], Callable[[], T]] | None = None) -> None:
        self._capture = capture_graph if capture is None else capture
        self._static_inputs: StepInputs = ()
        self._n_repeats = 0
        """Number of consecutive calls with the same input shapes, including the most recent one."""
        self._shapes: list[torch.Size | None] = []
        self._replay: Callable[[], T] | None = None

    def __call__(self, inputs: StepInputs, step_function: Callable[[StepInputs], T]) -> T:
        """Run or replay `step_function`, which must not read values back to the host.

        All other tensors that the function reads or modifies must keep their memory addresses between calls.
        """
        shapes = [None if tensor is None else tensor.shape for tensor in inputs]
        if self._replay is None:
            self._n_repeats = self._n_repeats + 1 if shapes == self._shapes else 1
            self._shapes = shapes
            if self._n_repeats > WARMUP_STEPS:
                self._static_inputs = inputs
                self._replay = self._capture(lambda: step_function(inputs))
        if self._replay is None or shapes != self._shapes:
            return step_function(inputs)
        for static, new in zip(self._static_inputs, inputs, strict=True):
            if static is not None and new is not None and new is not static:
                static.copy_(new)
        return self._replay()


def capture_graph(step_function: Callable[[], T]) -> Callable[[], T]:
    """Capture the kernels that `step_function` launches, without running them, and return a function that replays them.

    The capture mode `thread_local` forbids synchronizing calls only in this thread. Other threads are not restricted
    because the prefetch thread pins batches during the capture.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = step_function()

    def replay() -> T:
        graph.replay()
        return output

    return replay
