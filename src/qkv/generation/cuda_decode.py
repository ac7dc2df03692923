"""Who is written with a GPU's kernels, and several tokens at a time where nobody looks at the logits between them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from random import Random
from threading import Lock

import torch
from torch import Tensor, nn

from qkv.choices import HeadLayout, AttentionKernel, NormPosition
from qkv.config import SamplingConfig
from qkv.generation.cuda_decode_forward import KernelWeights
from qkv.generation.cuda_decode_step import TOKENS_PER_SYNC, CUDADecodeStep
from qkv.generation.sequence import GeneratedSequence
from qkv.models import GPT
from qkv.nn import Attention, Block, ConcatenatedPositions, FeedForward, Rotary, is_looked_at

ROOM = 256
"""Capacities are multiples of it, so that what was recorded for one text will do for the next."""
KEPT = 4
"""Steps of a model: each holds a whole cache of its own."""


class CUDADecodeStepPool:
    """A model's recorded steps, kept from call to call; made anew where a weight has changed."""

    def __init__(self, model: GPT) -> None:
        self._model = model
        self._state: list[tuple[int, int]] = []
        self._laid: KernelWeights | None = None
        self._made: list[CUDADecodeStep] = []
        self._lock = Lock()

    @contextmanager
    def taken(self, *, batch: int, capacity: int) -> Iterator[CUDADecodeStep]:
        """A step with an empty cache, for one writer at a time."""
        capacity = min(-(-capacity // ROOM) * ROOM, self._model.config.context_length)
        with self._lock:
            step = self._find(batch, capacity)
            step.is_taken = True
        try:
            yield step
        finally:
            step.is_taken = False
            if step.cache.batch != batch:  # rows were left out of it
                self._made = [one for one in self._made if one is not step]

    def _find(self, batch: int, capacity: int) -> CUDADecodeStep:
        state = [tensor_version(tensor) for tensor in self._model.parameters()]
        if self._laid is None or state != self._state:
            self._laid, self._state, self._made = KernelWeights(self._model), state, []
        for step in self._made:
            if not step.is_taken and step.cache.batch == batch and step.cache.capacity == capacity:
                step.cache.empty()
                return step
        step = CUDADecodeStep(self._model, self._laid, batch=batch, capacity=capacity)
        self._made = [step, *self._made[: KEPT - 1]]
        return step


def decode_n_tokens(
    step: CUDADecodeStep,
    first: Tensor,
    texts: Sequence[GeneratedSequence],
    *,
    sampling: SamplingConfig,
    chances: Sequence[Random],
) -> Iterator[tuple[list[int], list[float]]]:
    """The ids and log-probabilities of all rows, step by step, until all texts have ended; `first` was the step before.

    Rows that have ended are written on, for nobody: leaving them out would mean recording anew.
    """
    with torch.inference_mode():
        step.begin(first, step.cache.lengths)
    while any(text.finish_reason is None for text in texts):
        n = min(
            TOKENS_PER_SYNC,
            max(text.limit.max_new_tokens - len(text.new_ids) for text in texts if text.finish_reason is None),
        )
        with torch.inference_mode():
            if sampling.temperature > 0:
                drawn = [[chance.random() for chance in chances] for _ in range(n)]
                step.chances[:n] = torch.tensor(drawn, dtype=torch.float64, device=step.chances.device)
            written = step.write(n, sampling)
        yield from zip(*written, strict=True)


def can_sample_on_device(sampling: SamplingConfig) -> bool:
    """What was said before is known to the host alone."""
    return sampling.repetition_penalty == 1.0


def can_use_triton_kernels(model: GPT) -> bool:
    """On a GPU with Triton (which torch for Linux brings along)."""
    return model.embedding.token.weight.is_cuda and find_spec("triton") is not None and is_supported_by_kernels(model)


def is_supported_by_kernels(model: GPT) -> bool:
    """Whether the kernels know all that the model does: pre-norm, heads split, an output projection, rotary or added
    positions or none, no window, not in training, and no one looks inside (a tap, a hook, the plain kernel).
    """
    parts = list(model.modules())
    attentions = [part for part in parts if isinstance(part, Attention)]
    linears = [one for part in attentions for one in (part.q_proj, part.k_proj, part.v_proj, part.out_proj)]
    feed_forwards = [part for part in parts if isinstance(part, FeedForward)]
    linears += [one for part in feed_forwards for one in (part.up_proj, part.down_proj, part.gate_proj or part.up_proj)]
    return (
        not model.training
        and model.config.sliding_window is None
        and model.config.causal
        and model.embedding.norm is None
        and model.unembedding.int8 is None
        and not isinstance(model.embedding.position, ConcatenatedPositions)
        and (model.relation is None or isinstance(model.relation, Rotary))
        and all(part.norm_position is NormPosition.PRE for part in parts if isinstance(part, Block))
        and all(
            part.head_config.layout is HeadLayout.SPLIT and part.kernel is AttentionKernel.FUSED for part in attentions
        )
        and all(type(one) is nn.Linear for one in linears)
        and not any(is_looked_at(part) for part in parts)
    )


def tensor_version(tensor: Tensor) -> tuple[int, int]:
    """Another one where the tensor is, or its numbers are; but for a change through `.data` in place."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version  # noqa: SLF001
