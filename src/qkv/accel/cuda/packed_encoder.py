"""Encode texts of different lengths on a GPU by packing them into one row without padding."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from qkv.accel.cuda.decode_forward import power_of_two
from qkv.models import BERT
from qkv.nn import Varlen
from qkv.tensors import Residual

MAX_TOKENS_PER_ROW = 1 << 14
"""The maximum number of tokens per row, which is enough to fully utilize a large GPU."""
MAX_TEXTS_PER_ROW = 512
"""The maximum number of texts per row."""
ROW_MULTIPLE = 128
"""Rows are padded to a multiple of this number or, for compiled models, to a power of two."""
COPY_ALIGNMENT = 16
"""The alignment of inputs in bytes. A compiled graph copies any input that is not aligned."""

TokenRows = Sequence[Sequence[int]]


def supports_varlen_attention(model: BERT) -> bool:
    """Return whether torch provides a variable-length attention kernel for the model.

    The kernel requires 16-bit weights on a GPU and as many key/value heads as query heads. It does not support relative
    positions or sliding windows.
    """
    weight, config = model.embedding.token.weight, model.config
    is_supported = model.relative_positions is None and config.sliding_window is None and config.scale_scores
    is_supported = is_supported and (config.n_heads, config.d_head) == (config.n_kv_heads, config.d_value)
    return weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16) and is_supported


def pack_by_length(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Sort texts by length, and yield the indices of the texts in each row.

    The number of tokens and the number of texts per row are limited.
    """
    row: list[int] = []
    n_tokens = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if row and (n_tokens + lengths[index] > MAX_TOKENS_PER_ROW or len(row) == MAX_TEXTS_PER_ROW):
            yield row
            row, n_tokens = [], 0
        row.append(index)
        n_tokens += lengths[index]
    if row:
        yield row


class PackedEncoder:
    """An encoder that computes the final states of texts packed into one row.

    If `compiled` is set, one graph is compiled for each padded size. Each compilation takes many seconds, but later
    calls with the same size are faster.
    """

    def __init__(self, model: BERT, *, compiled: bool = False) -> None:
        self.model = model
        self.compiled = compiled
        self._device = model.embedding.token.weight.device
        self._run: Callable[..., Tensor] = self._forward_packed
        if compiled:
            self._run = torch.compile(self._forward_packed, dynamic=False, fullgraph=True, mode="reduce-overhead")

    def group(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        return pack_by_length(lengths)

    @torch.no_grad()
    def encode(self, ids: TokenRows, segments: TokenRows | None = None) -> Residual:
        """Return the final states in shape (text, position, d_model), with zeros after the end of each text."""
        lengths = np.fromiter((len(row) for row in ids), np.int64, len(ids))
        n, n_texts, longest = int(lengths.sum()), len(ids), int(lengths.max())
        size, n_slots, max_length = self._padded_sizes(n, n_texts, longest)
        # The padding consists of padding texts of maximum length, followed by empty texts.
        padding_ends = n + max_length * np.arange(n_slots - n_texts + 1)
        cu_seqlens = np.concatenate(([0], lengths.cumsum()[:-1], padding_ends.clip(max=size))).astype(np.int32)
        is_table = n == n_texts * longest
        # The index of each token in a flattened table with one row per text.
        table_index = np.arange(n) - np.repeat(cu_seqlens[:n_texts] - np.arange(n_texts) * longest, lengths)
        arrays = [_concatenate_and_pad(rows, n, size) for rows in (ids, segments) if rows is not None]
        device_cu_seqlens, table_indices, row, *segment_row = self._copy_to_device(
            cu_seqlens, table_index[: 0 if is_table else n], *arrays
        )
        # Over a hundred combinations of padded sizes are possible, but by default, torch stops compiling at the ninth.
        with torch._dynamo.config.patch(recompile_limit=256) if self.compiled else nullcontext():  # noqa: SLF001
            states = self._run(row[None], segment_row[0][None] if segment_row else None, device_cu_seqlens, max_length)[
                :n
            ]
        if is_table:
            # Copy the output because the next replay of the graph overwrites it.
            return states.clone().view(n_texts, longest, -1)
        table = states.new_zeros(n_texts * longest, states.shape[-1])
        return table.index_copy_(0, table_indices, states).view(n_texts, longest, -1)

    def _padded_sizes(self, n: int, n_texts: int, longest: int) -> tuple[int, int, int]:
        """Return the padded number of tokens, the padded number of texts, and the padded maximum length.

        For compiled graphs, the sizes are rounded so that few distinct sizes occur.
        """
        if not self.compiled:
            size = -(-n // ROW_MULTIPLE) * ROW_MULTIPLE
            return size, n_texts + -(-(size - n) // longest), longest
        size = max(power_of_two(n), 8 * ROW_MULTIPLE)
        max_length = min(max(power_of_two(longest), ROW_MULTIPLE), self.model.config.context_length)
        # Reserve as many slots as the padding texts need. They fill less than half a row except at the smallest size.
        # Additional empty texts would take time.
        n_fillers = size // max_length // (2 if 2 * n > size else 1) + 1
        return size, power_of_two(n_texts) + n_fillers, max_length

    def _forward_packed(self, ids: Tensor, segments: Tensor | None, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        return self.model(ids, segments=segments, documents=Varlen(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen))[0]

    def _copy_to_device(self, *arrays: np.ndarray) -> list[Tensor]:
        """Copy arrays to the model's device in a single transfer because each transfer has a fixed cost."""
        *starts, n = accumulate((-(-array.nbytes // COPY_ALIGNMENT) * COPY_ALIGNMENT for array in arrays), initial=0)
        slices = [slice(start, start + array.nbytes) for start, array in zip(starts, arrays, strict=True)]
        # torch's pinned-memory pool does not reuse this buffer before the copy has finished.
        host_buffer = torch.empty(n, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        for target, array in zip(slices, arrays, strict=True):
            host_buffer.numpy()[target] = array.view(np.uint8)
        device_buffer = host_buffer.to(self._device, non_blocking=True)
        return [
            device_buffer[target].view(torch.from_numpy(array).dtype)
            for target, array in zip(slices, arrays, strict=True)
        ]


def _concatenate_and_pad(rows: TokenRows, n: int, size: int) -> np.ndarray:
    """Concatenate all rows, and pad the result with zeros to the given size."""
    flat = np.zeros(size, np.int64)
    flat[:n] = np.fromiter(chain.from_iterable(rows), np.int64, n)
    return flat
