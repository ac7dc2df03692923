"""Reuse captured CUDA decode steps, and decode several tokens per synchronization with the host."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from random import Random
from threading import Lock

import torch
from torch import Tensor, nn

from qkv.accel.cuda.decode_forward import KernelWeights
from qkv.accel.cuda.decode_step import TOKENS_PER_SYNC, CUDADecodeStep
from qkv.choices import AttentionKernel, HeadCombination, NormPosition
from qkv.config import SamplingConfig
from qkv.generation.sequence import GeneratedSequence
from qkv.models import GPT
from qkv.nn import (
    Attention,
    Block,
    ConcatenatedSinusoidalPositions,
    FeedForward,
    RotaryEmbedding,
    has_hooks_or_is_active_tap,
)

CAPACITY_MULTIPLE = 256
"""Capacities are rounded up to a multiple of this number so that captured steps can be reused for other sequences."""
MAX_POOLED_STEPS = 4
"""Maximum number of steps in the pool. Each step has its own KV cache."""


class CUDADecodeStepPool:
    """Pool of a model's captured decode steps, which are reused between calls until a weight changes."""

    def __init__(self, model: GPT) -> None:
        self._model = model
        self._versions: list[tuple[int, int]] = []
        self._weights: KernelWeights | None = None
        self._steps: list[CUDADecodeStep] = []
        self._lock = Lock()

    @contextmanager
    def acquire(self, *, batch: int, capacity: int) -> Iterator[CUDADecodeStep]:
        """Acquire a step with an empty cache for exclusive use inside the context."""
        rounded = -(-capacity // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE
        capacity = min(rounded, self._model.config.context_length)
        with self._lock:
            step = self._find_or_create_for_current_weights(batch, capacity)
            step.in_use = True
        try:
            yield step
        finally:
            step.in_use = False
            if step.cache.batch != batch:  # the step cannot be reused because rows were removed from its cache
                self._steps = [pooled for pooled in self._steps if pooled is not step]

    def _find_or_create_for_current_weights(self, batch: int, capacity: int) -> CUDADecodeStep:
        versions = [tensor_version(tensor) for tensor in self._model.parameters()]
        if self._weights is None or versions != self._versions:
            self._weights, self._versions, self._steps = KernelWeights(self._model), versions, []
        for step in self._steps:
            if not step.in_use and step.cache.batch == batch and step.cache.capacity == capacity:
                step.cache.reset()
                return step
        step = CUDADecodeStep(self._model, self._weights, batch=batch, capacity=capacity)
        self._steps = [step, *self._steps[: MAX_POOLED_STEPS - 1]]
        return step


def decode_until_all_finished(
    step: CUDADecodeStep,
    first_ids: Tensor,
    sequences: Sequence[GeneratedSequence],
    *,
    sampling: SamplingConfig,
    generators: Sequence[Random],
) -> Iterator[tuple[list[int], list[float]]]:
    """Decode up to `TOKENS_PER_SYNC` tokens at a time until all sequences are finished.

    Yields the ids and log-probabilities of all rows for each step. `first_ids` are the tokens chosen after the prefill.
    Finished rows continue to decode because removing them would require capturing a new CUDA graph.
    """
    with torch.inference_mode():
        step.set_inputs(first_ids, step.cache.lengths)
    while unfinished := [sequence for sequence in sequences if sequence.finish_reason is None]:
        n_left = max(sequence.limit.max_new_tokens - len(sequence.new_ids) for sequence in unfinished)
        n = min(TOKENS_PER_SYNC, n_left)
        with torch.inference_mode():
            if sampling.temperature > 0:
                uniform = [[generator.random() for generator in generators] for _ in range(n)]
                step.uniform[:n] = torch.tensor(uniform, dtype=torch.float64, device=step.uniform.device)
            outputs = step.decode_tokens(n, sampling)
        yield from zip(*outputs, strict=True)


def can_sample_on_device(sampling: SamplingConfig) -> bool:
    """Return whether the GPU can choose tokens without the host.

    A repetition penalty requires the host, which tracks all tokens.
    """
    return sampling.repetition_penalty == 1.0


def can_use_triton_kernels(model: GPT) -> bool:
    """Return whether the model is on a GPU, Triton is installed and the Triton kernels support the model.

    Torch for Linux includes Triton.
    """
    return model.embedding.token.weight.is_cuda and find_spec("triton") is not None and is_supported_by_kernels(model)


def is_supported_by_kernels(model: GPT) -> bool:
    """Return whether the Triton kernels support this model.

    The kernels require evaluation mode, pre-norm blocks, split heads with an output projection, causal attention
    without a sliding window, and rotary, added or no positions. Hooks and the explicit attention kernel are not
    supported.
    """
    modules = list(model.modules())
    attentions = [module for module in modules if isinstance(module, Attention)]
    linears = [linear for part in attentions for linear in (part.q_proj, part.k_proj, part.v_proj, part.out_proj)]
    feed_forwards = [module for module in modules if isinstance(module, FeedForward)]
    linears += [
        linear for part in feed_forwards for linear in (part.up_proj, part.down_proj, part.gate_proj or part.up_proj)
    ]
    return (
        not model.training
        and model.config.sliding_window is None
        and model.config.causal
        and model.embedding.norm is None
        and model.unembedding.int8 is None
        and not isinstance(model.embedding.position, ConcatenatedSinusoidalPositions)
        and (model.relative_positions is None or isinstance(model.relative_positions, RotaryEmbedding))
        and all(module.norm_position is NormPosition.PRE for module in modules if isinstance(module, Block))
        and all(
            part.head_config.combination is HeadCombination.SPLIT and part.kernel is AttentionKernel.FUSED
            for part in attentions
        )
        and all(type(linear) is nn.Linear for linear in linears)
        and not any(has_hooks_or_is_active_tap(module) for module in modules)
    )


def tensor_version(tensor: Tensor) -> tuple[int, int]:
    """Return a key that changes if the tensor is replaced or modified, except for in-place changes through `.data`."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version  # noqa: SLF001
