"""Which training steps does a GPU play back? Those of one shape: recorded once, they cost the CPU a single launch.

A step of a small model is thousands of kernels that each take a few microseconds, less than their launches do.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from qkv.config import TrainingConfig
from qkv.training.objectives import Halves, Objective, Sent

T = TypeVar("T")
N_PLAIN = 2
"""Steps before the recording, for what happens once alone: compiling, choosing kernels, making optimizers' memory."""


def is_replayed(objective: Objective, config: TrainingConfig, device: torch.device) -> bool:
    """Compiled, on a GPU, in one part and by one process, whose objective alone is still in halves.

    A second part would add its gradients to the first one's, which a recording of one part has let go of.
    """
    is_one_part = config.micro_batch_size == config.batch_size
    is_plain = is_one_part and config.compile and not config.checkpoint_activations
    return device.type == "cuda" and is_plain and isinstance(objective, Halves)


class Replay(Generic[T]):
    """Work recorded when tensors of one shape come the third time. What it gives is overwritten by the next call."""

    def __init__(self, record: Callable[[Callable[[], T]], Callable[[], T]] | None = None) -> None:
        self._record = recorded if record is None else record
        self._held: Sent = ()
        self._n_alike = 0
        """Calls in a row, the last one included, with tensors of one shape."""
        self._shapes: list[torch.Size | None] = []
        self._replay: Callable[[], T] | None = None

    def __call__(self, given: Sent, work: Callable[[Sent], T]) -> T:
        """`work`: without a look at any value; all it reads or changes besides `given` stays where it is in memory."""
        shapes = [None if one is None else one.shape for one in given]
        if self._replay is None:
            self._n_alike = self._n_alike + 1 if shapes == self._shapes else 1
            self._shapes = shapes
            if self._n_alike > N_PLAIN:
                self._held = given
                self._replay = self._record(lambda: work(given))
        if self._replay is None or shapes != self._shapes:
            return work(given)
        for held, new in zip(self._held, given, strict=True):
            if held is not None and new is not None and new is not held:
                held.copy_(new)
        return self._replay()


def recorded(work: Callable[[], T]) -> Callable[[], T]:
    """The work's kernels, not yet run; only this thread must not wait meanwhile (another one reads batches)."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = work()

    def replay() -> T:
        graph.replay()
        return made

    return replay
