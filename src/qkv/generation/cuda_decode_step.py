"""One more token a row of a GPT on a GPU: few kernels, recorded once as a CUDA graph and replayed, choosing included.

A small model's step on a GPU is all launches: its own road makes hundreds of them. `gpu.is_supported_by_kernels` is the rule for
who goes this way.
"""

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from qkv.config import SamplingConfig
from qkv.generation.cuda_decode_forward import (
    KernelWeights,
    ManyRows,
    OneRow,
    StepTensors,
    position_tables,
    power_of_two,
)
from qkv.generation.sampling import choose_next_ids, gather_log_probabilities
from qkv.models import GPT

TOKENS_PER_SYNC = 32
"""Tokens a row that are written before the first of them is read: what comes after an end is thrown away."""
VOCABULARY_BLOCK = 4096


class CUDADecodeStep:
    """The tensors of a step for so many rows, its cache among them, and what was recorded of it."""

    def __init__(self, model: GPT, laid: KernelWeights, *, batch: int, capacity: int) -> None:
        self.cache = model.new_cache(batch=batch, capacity=capacity)
        self.is_taken = False
        """By one who is writing with it."""
        tokens, rows = laid.tokens, batch
        # From Hopper on a kernel may begin while the one before it ends.
        can_overlap = tokens.is_cuda and torch.cuda.get_device_capability(tokens.device)[0] >= 9
        self._overlap = {"OVERLAP": True, "launch_pdl": True} if can_overlap else {"OVERLAP": False}
        self.ids = torch.zeros(rows, dtype=torch.long, device=tokens.device)
        self.positions, self._steps = torch.zeros_like(self.ids), torch.zeros_like(self.ids)
        self.logits = tokens.new_empty(rows, tokens.shape[0], dtype=torch.float32)
        places, rotation = position_tables(model, capacity)
        given = StepTensors(
            ids=self.ids, positions=self.positions, keys=self.cache.keys, values=self.cache.values, logits=self.logits,
            places=places, rotation=rotation, overlap=self._overlap,
        )  # fmt: skip
        self.forward: Callable[[], None] = OneRow(laid, given) if rows == 1 else ManyRows(laid, given)
        """All kernels of a step, from `ids` and `positions` to `logits`."""
        n_blocks = -(-self.logits.shape[1] // VOCABULARY_BLOCK)
        self._tops = self.logits.new_empty(rows, n_blocks)
        self._weights, self._at = torch.empty_like(self._tops), self._tops.to(torch.int32)
        self.told_ids = torch.zeros(TOKENS_PER_SYNC, rows, dtype=torch.long, device=tokens.device)
        self.told_log_p = self.logits.new_zeros(TOKENS_PER_SYNC, rows)
        self.chances = self.told_log_p.double()
        """For each step and row: where in the distribution its token is drawn."""
        self._graphs: dict[SamplingConfig | None, torch.cuda.CUDAGraph] = {}

    def logits_after(self, ids: Tensor, positions: Tensor) -> Tensor:
        """The logits of the token after these; good until the next call."""
        self.begin(ids, positions)
        self._replay(None, self.forward)
        return self.logits

    def begin(self, ids: Tensor, positions: Tensor) -> None:
        """Each row's token that is to be read next, and where it stands."""
        self.ids.copy_(ids)
        self.positions.copy_(positions)

    def write(self, n: int, sampling: SamplingConfig) -> tuple[list[list[int]], list[list[float]]]:
        """n more tokens a row, with their log-probabilities; nothing waits for the GPU before the last of them."""
        assert n <= TOKENS_PER_SYNC
        self._steps.zero_()
        # What is recorded reads its chances, not the seed they were drawn with: one recording does for every seed.
        key = sampling.replace(seed=0)
        for _ in range(n):
            self._replay(key, lambda: self._forward_and_choose(sampling))
        told = torch.cat((self.told_ids[:n].double(), self.told_log_p[:n].double())).tolist()
        return [[int(number) for number in row] for row in told[:n]], told[n:]

    def _replay(self, key: SamplingConfig | None, work: Callable[[], None]) -> None:
        if not self.ids.is_cuda:  # Triton's interpreter, for tests
            work()
            return
        if key not in self._graphs:
            self._graphs[key] = self._recorded(work)
        self._graphs[key].replay()

    def _recorded(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        kept = [tensor.clone() for tensor in (self.ids, self.positions, self._steps)]
        # The first run compiles the kernels; what it changes is put back.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        for tensor, before in zip((self.ids, self.positions, self._steps), kept, strict=True):
            tensor.copy_(before)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph

    def _forward_and_choose(self, sampling: SamplingConfig) -> None:
        self.forward()
        (rows, n), n_blocks = self.logits.shape, self._tops.shape[1]
        last = self.cache.capacity - 1
        if sampling.temperature == 0:
            kernels = import_module("qkv.generation.triton_batch_kernels")
            kernels.best_of_blocks[(rows, n_blocks)](
                self.logits, self._tops, self._at, self._weights, n, BLOCK=VOCABULARY_BLOCK, **self._overlap
            )
            kernels.take_best[(rows,)](
                self._tops, self._at, self._weights, self.ids, self.positions, self._steps, self.told_ids,
                self.told_log_p, n, n_blocks, last, BLOCK=power_of_two(n_blocks), **self._overlap,
            )  # fmt: skip
            return
        step = self._steps[:1]
        chosen = choose_next_ids(self.logits, sampling, seen_mask=None, uniform=self.chances.index_select(0, step)[0])
        self.told_ids.index_copy_(0, step, chosen[None])
        self.told_log_p.index_copy_(0, step, gather_log_probabilities(self.logits, chosen)[None])
        self.ids.copy_(chosen)
        self.positions.add_(1).clamp_(max=last)
        self._steps.add_(1)
