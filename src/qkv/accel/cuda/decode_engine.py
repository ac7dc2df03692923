"""Decode engine for NVIDIA GPUs, which runs a GPT with Triton kernels in CUDA graphs."""

from torch import Tensor

from qkv.accel.cuda.decode_pool import CUDADecodeStepPool
from qkv.accel.cuda.decode_step import TOKENS_PER_SYNC
from qkv.accel.cuda.fused_modules import find_fused_replacement
from qkv.accel.swap import ModuleSwap
from qkv.config import SamplingConfig
from qkv.generation.decode_engine import GPTDecodeEngine, RowIds, SequenceIndices, TokenLists
from qkv.generation.sampling import NextLogits
from qkv.models import GPT


class CUDADecodeEngine:
    """Engine that processes prompts with the reference model and decodes tokens with a captured step."""

    tokens_per_sync = TOKENS_PER_SYNC

    def __init__(self, model: GPT, pool: CUDADecodeStepPool, *, batch: int, capacity: int) -> None:
        self._model, self._pool = model, pool
        self._step = pool.acquire(model, batch=batch, capacity=capacity)
        self._eager = GPTDecodeEngine(model, self._step.cache)
        self._modules = ModuleSwap(model, find_fused_replacement)

    def prefill(self, prompts: TokenLists, *, sources: TokenLists | None = None) -> NextLogits:
        with self._modules:
            return self._eager.prefill(prompts, sources=sources)

    def decode(self, ids: RowIds) -> NextLogits:
        if not self._step.can_read_cache:
            # The tensors of a captured step have a fixed number of rows. After rows have been dropped or added, the
            # remaining tokens are decoded with the reference model.
            return self._eager.decode(ids)
        positions = self._step.cache.reserve(batch=len(ids), n_new=1)
        return self._step.decode_logits(ids, positions[:, 0].expand(len(ids)))

    def reorder(self, rows: RowIds, *, sequences: SequenceIndices | None = None, common_prefix: int = 0) -> None:
        self._eager.reorder(rows, sequences=sequences, common_prefix=common_prefix)

    def close(self) -> None:
        self._pool.release(self._step)

    def can_sample(self, sampling: SamplingConfig) -> bool:
        """Return whether the GPU can choose tokens without the host.

        A repetition penalty requires the host, which tracks all tokens.
        """
        return sampling.repetition_penalty == 1.0

    def set_next_ids(self, ids: RowIds) -> None:
        self._step.set_inputs(ids, self._step.cache.lengths)

    def sample_tokens(
        self, n: int, sampling: SamplingConfig, uniform: Tensor | None
    ) -> tuple[list[list[int]], list[list[float]]]:
        if uniform is not None:
            self._step.uniform[:n] = uniform
        return self._step.decode_tokens(n, sampling)
