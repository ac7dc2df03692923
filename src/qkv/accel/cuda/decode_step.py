"""Capture a GPT decode step on a GPU as a CUDA graph that also chooses the next token.

For small models, the time of an eager decode step is dominated by hundreds of kernel launches. This step uses few
kernels and replays them as a graph. `CUDABackend.supports` returns which models are supported.
"""

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from qkv.accel.cuda.decode_forward import (
    BatchForward,
    KernelWeights,
    SingleRowForward,
    StepTensors,
    position_tables,
    power_of_two,
)
from qkv.config import SamplingConfig
from qkv.generation.sampling import choose_next_ids, gather_log_probabilities
from qkv.models import GPT

TOKENS_PER_SYNC = 32
"""Number of tokens per row to decode before the host reads them. Tokens after a stop token are discarded."""
VOCAB_BLOCK = 4096
"""Number of logits that a program of the argmax kernel processes."""


class CUDADecodeStep:
    """Decode step for a fixed batch size, with preallocated tensors, a KV cache and captured CUDA graphs."""

    def __init__(self, model: GPT, weights: KernelWeights, *, batch: int, capacity: int) -> None:
        self.cache = model.new_cache(batch=batch, capacity=capacity)
        self._captured_keys = self.cache.keys
        self.in_use = False
        """Whether a caller of `CUDADecodeStepPool.acquire` has not released this step yet."""
        token_embedding = weights.token_embedding
        device = token_embedding.device
        # Hopper and newer GPUs support programmatic dependent launch: a kernel may start before the previous one ends.
        supports_pdl = token_embedding.is_cuda and torch.cuda.get_device_capability(device)[0] >= 9
        self._launch_options = {"USE_PDL": True, "launch_pdl": True} if supports_pdl else {"USE_PDL": False}
        self.ids = torch.zeros(batch, dtype=torch.long, device=device)
        self.positions, self._steps = torch.zeros_like(self.ids), torch.zeros_like(self.ids)
        self.logits = token_embedding.new_empty(batch, token_embedding.shape[0], dtype=torch.float32)
        position_embedding, rotation = position_tables(model, capacity)
        tensors = StepTensors(
            ids=self.ids,
            positions=self.positions,
            keys=self.cache.keys,
            values=self.cache.values,
            logits=self.logits,
            position_embedding=position_embedding,
            rotation=rotation,
            launch_options=self._launch_options,
        )
        self.forward: Callable[[], None] = (
            SingleRowForward(weights, tensors) if batch == 1 else BatchForward(weights, tensors)
        )
        """Function that launches all kernels of a step, from `ids` and `positions` to `logits`."""
        n_blocks = -(-self.logits.shape[1] // VOCAB_BLOCK)
        self._block_max = self.logits.new_empty(batch, n_blocks)
        self._block_exp_sum = torch.empty_like(self._block_max)
        self._block_argmax = self._block_max.to(torch.int32)
        self.output_ids = torch.zeros(TOKENS_PER_SYNC, batch, dtype=torch.long, device=device)
        self.output_log_p = self.logits.new_zeros(TOKENS_PER_SYNC, batch)
        self.uniform = self.output_log_p.double()
        """Uniform random numbers for sampling, with shape (step, row)."""
        self._graphs: dict[SamplingConfig | None, torch.cuda.CUDAGraph] = {}

    @property
    def can_read_cache(self) -> bool:
        """Whether the cache still consists of the tensors that the kernels read.

        They are replaced if rows are added or dropped, even if the number of rows is the same again later.
        """
        return self.cache.keys is self._captured_keys

    def decode_logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Decode one token per row and return the logits, which are valid only until the next call."""
        self.set_inputs(ids, positions)
        self._replay(None, self.forward)
        return self.logits

    def set_inputs(self, ids: Tensor, positions: Tensor) -> None:
        """Set the next input token of each row and its position."""
        self.ids.copy_(ids)
        self.positions.copy_(positions)

    def decode_tokens(self, n: int, sampling: SamplingConfig) -> tuple[list[list[int]], list[list[float]]]:
        """Decode `n` tokens per row and return their ids and log-probabilities, each of shape (step, row).

        The host synchronizes with the GPU only once, after the last token.
        """
        assert n <= TOKENS_PER_SYNC
        self._steps.zero_()
        # A graph reads random numbers instead of the seed, so all seeds share one graph.
        key = sampling.replace(seed=0)
        for _ in range(n):
            self._replay(key, lambda: self._forward_and_choose(sampling))
        outputs = torch.cat((self.output_ids[:n].double(), self.output_log_p[:n].double())).tolist()
        return [[int(token_id) for token_id in row] for row in outputs[:n]], outputs[n:]

    def _replay(self, key: SamplingConfig | None, launch: Callable[[], None]) -> None:
        """Replay the graph for `key`. On first use, the graph is captured from `launch`."""
        if not self.ids.is_cuda:  # tests run the kernels in Triton's interpreter
            launch()
            return
        if key not in self._graphs:
            self._graphs[key] = self._capture(launch)
        self._graphs[key].replay()

    def _capture(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        state = (self.ids, self.positions, self._steps)
        saved = [tensor.clone() for tensor in state]
        # The first run compiles the kernels. It also advances the state, which is restored afterwards.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            launch()
        torch.cuda.current_stream().wait_stream(stream)
        for tensor, value in zip(state, saved, strict=True):
            tensor.copy_(value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        return graph

    def _forward_and_choose(self, sampling: SamplingConfig) -> None:
        """Compute the logits, choose the next token of each row and advance all rows by one position."""
        self.forward()
        (rows, vocab_size), n_blocks = self.logits.shape, self._block_max.shape[1]
        # Finished rows continue to decode. Their position is clamped so that they do not write beyond the cache.
        last_position = self.cache.capacity - 1
        if sampling.temperature == 0:
            kernels = import_module("qkv.accel.cuda.triton_batch_kernels")
            kernels.argmax_blocks_kernel[(rows, n_blocks)](
                self.logits,
                self._block_max,
                self._block_argmax,
                self._block_exp_sum,
                vocab_size,
                BLOCK=VOCAB_BLOCK,
                **self._launch_options,
            )
            kernels.select_argmax_and_advance_kernel[(rows,)](
                self._block_max,
                self._block_argmax,
                self._block_exp_sum,
                self.ids,
                self.positions,
                self._steps,
                self.output_ids,
                self.output_log_p,
                vocab_size,
                n_blocks,
                last_position,
                BLOCK=power_of_two(n_blocks),
                **self._launch_options,
            )
            return
        step = self._steps[:1]
        uniform = self.uniform.index_select(0, step)[0]
        # Sorting the full vocabulary for top-p avoids reading a number back, which a graph cannot do.
        chosen = choose_next_ids(
            self.logits, sampling, seen_mask=None, uniform=uniform, n_candidates=self.logits.shape[1]
        )
        self.output_ids.index_copy_(0, step, chosen[None])
        self.output_log_p.index_copy_(0, step, gather_log_probabilities(self.logits, chosen)[None])
        self.ids.copy_(chosen)
        self.positions.add_(1).clamp_(max=last_position)
        self._steps.add_(1)
