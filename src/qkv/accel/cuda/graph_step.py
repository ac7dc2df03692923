"""Capture training steps in CUDA graphs and replay them.

A step of a small model runs thousands of kernels. Each kernel runs for only a few microseconds, which is less than the
time to launch it. Replaying a captured graph requires only a single launch.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from qkv.config import TrainingConfig
from qkv.training.objectives import DeviceInputs, Objective, SplitObjective

T = TypeVar("T")
WARMUP_STEPS = 2
"""Number of eager steps before the capture. They perform one-time work: compilation, kernel selection and optimizer
state allocation."""


def can_capture(objective: Objective, config: TrainingConfig, device: torch.device) -> bool:
    """Return True if training steps can be captured in a CUDA graph.

    Capturing requires a compiled model, a CUDA device, a single process and one micro-batch per batch. With several
    processes, the objective is wrapped and is no longer a `SplitObjective`. With several micro-batches, the second one
    would have to add to the gradients of the first, but these have already been freed after its capture.
    """
    has_one_micro_batch = config.micro_batch_size == config.batch_size
    is_capturable = has_one_micro_batch and config.compile and not config.activation_checkpointing
    return device.type == "cuda" and is_capturable and isinstance(objective, SplitObjective)


class CUDAGraphStep(Generic[T]):
    """A training step that runs eagerly at first and is captured in a CUDA graph once the input shapes repeat.

    The step is captured at the third consecutive call with the same shapes. Steps with other input shapes run eagerly.
    The returned tensors are overwritten by the next call.
    """

    def __init__(self, capture: Callable[[Callable[[], T]], Callable[[], T]] | None = None) -> None:
        self._capture = capture_graph if capture is None else capture
        self._static_inputs: DeviceInputs = ()
        self._n_repeats = 0
        """Number of consecutive calls with the same input shapes, including the most recent one."""
        self._shapes: list[torch.Size | None] = []
        self._replay: Callable[[], T] | None = None

    def __call__(self, inputs: DeviceInputs, step_function: Callable[[DeviceInputs], T]) -> T:
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
