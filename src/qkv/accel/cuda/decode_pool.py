"""Pool of captured CUDA decode steps, which are reused by later generations."""

from threading import Lock

from qkv.accel.cuda.decode_forward import KernelWeights
from qkv.accel.cuda.decode_step import CUDADecodeStep
from qkv.accel.support import tensor_version
from qkv.models import GPT

CAPACITY_MULTIPLE = 256
"""Capacities are rounded up to a multiple of this number so that captured steps can be reused for other sequences."""
MAX_POOLED_STEPS = 4
"""Maximum number of steps in the pool. Each step has its own KV cache."""


class CUDADecodeStepPool:
    """Pool of a model's captured decode steps, which are reused between calls until a weight changes."""

    def __init__(self) -> None:
        self._versions: list[tuple[int, int]] = []
        self._weights: KernelWeights | None = None
        self._steps: list[CUDADecodeStep] = []
        self._lock = Lock()

    def acquire(self, model: GPT, *, batch: int, capacity: int) -> CUDADecodeStep:
        """Return a step with an empty cache, which nobody else uses until it is released."""
        rounded = -(-capacity // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE
        capacity = min(rounded, model.config.context_length)
        with self._lock:
            step = self._find_or_create_for_current_weights(model, batch, capacity)
            step.in_use = True
        return step

    def release(self, step: CUDADecodeStep) -> None:
        """Allow others to use the step. A step whose cache has lost or gained rows is discarded."""
        with self._lock:
            step.in_use = False
            if not step.can_read_cache:
                self._steps = [pooled for pooled in self._steps if pooled is not step]

    def _find_or_create_for_current_weights(self, model: GPT, batch: int, capacity: int) -> CUDADecodeStep:
        versions = [tensor_version(tensor) for tensor in model.parameters()]
        if self._weights is None or versions != self._versions:
            self._weights, self._versions, self._steps = KernelWeights(model), versions, []
        for step in self._steps:
            if not step.in_use and step.cache.batch == batch and step.cache.capacity == capacity:
                step.cache.reset()
                return step
        step = CUDADecodeStep(model, self._weights, batch=batch, capacity=capacity)
        self._steps = [step, *self._steps[: MAX_POOLED_STEPS - 1]]
        return step
