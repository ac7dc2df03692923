"""Encode texts of different lengths on a GPU by packing them into one row without padding."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Self

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from qkv.accel.cuda.compile_checks import is_compiled_for_inference
from qkv.accel.cuda.decode_forward import power_of_two
from qkv.accel.cuda.fused_modules import FusedAttention, find_fused_replacement
from qkv.accel.swap import ModuleSwap, share_attributes
from qkv.models import BERT
from qkv.models.stack import check_length
from qkv.nn import Attention, Mask
from qkv.nn.cache import LayerCache, LayerSourceCache
from qkv.nn.positions import PositionInfo
from qkv.tensors import Positions, Residual

MAX_SHORT_SEQLEN = 128
"""Maximum sequence length for the short-sequence Triton kernel, which loads all keys as one block."""

MAX_TOKENS_PER_ROW = 1 << 14
"""The maximum number of tokens per row, which is enough to fully utilize a large GPU."""
MAX_TEXTS_PER_ROW = 512
"""The maximum number of texts per row."""
ROW_MULTIPLE = 128
"""Rows are padded to a multiple of this number or, for compiled models, to a power of two."""
COPY_ALIGNMENT = 16
"""The alignment of inputs in bytes. A compiled graph copies any input that is not aligned."""

TokenRows = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class VarlenMask(Mask):
    """Mask for texts that are packed back to back in one row without padding. Each text attends only to itself."""

    cu_seqlens: Int[Tensor, " edge"]
    """Start of each text, followed by the length of the row (int32, on the model's device).

    Texts may be empty so that every batch can have the same number of texts.
    """
    max_seqlen: int
    """Upper bound on the length of a text."""

    def materialize_if_kernel_needs_it(self, n_queries: int, n_keys: int, device: torch.device) -> Self:  # noqa: ARG002
        """Return the mask itself, because the kernels read the boundaries of the texts."""
        return self

    def text_indices(self, n: int) -> Int[Tensor, "1 position"]:
        """Return the index of the text of each of the `n` positions in the row."""
        row_positions = torch.arange(n, device=self.cu_seqlens.device, dtype=self.cu_seqlens.dtype)
        return torch.searchsorted(self.cu_seqlens, row_positions, right=True)[None] - 1

    def position_ids(self, n: int) -> Positions:
        """Return the position of each token within its own text."""
        return torch.arange(n, device=self.cu_seqlens.device)[None] - self.cu_seqlens[self.text_indices(n)]


class VarlenAttention(FusedAttention):
    """Self-attention within each text of a packed row."""

    def forward(
        self,
        x: Residual,
        *,
        source: Tensor | None = None,
        mask: Mask | None = None,
        position_info: PositionInfo | None = None,
        cache: LayerCache | LayerSourceCache | None = None,
    ) -> Residual:
        assert isinstance(mask, VarlenMask)
        assert source is None
        assert position_info is None
        assert cache is None
        # (1, head, position, d_head) → (position, head, d_head), the layout of variable-length kernels.
        queries, keys, values = (part[0].transpose(0, 1) for part in self.project_qkv(x))
        head_outputs = varlen_attention(queries, keys, values, mask).transpose(0, 1)[None]
        return self.out_proj(self.combine_heads(head_outputs))


def varlen_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: VarlenMask) -> Tensor:
    """Compute attention within each text. All tensors have shape (position, head, d_head)."""
    can_be_short = mask.max_seqlen <= MAX_SHORT_SEQLEN and queries.shape[-1] in (16, 32, 64, 128)
    if can_be_short and is_compiled_for_inference(queries):
        # Imported here because Triton is not available on machines without a GPU.
        from qkv.accel.cuda.varlen_kernel import short_varlen_attention

        return short_varlen_attention(queries, keys, values, mask.cu_seqlens, mask.max_seqlen)
    from torch.nn.attention.varlen import varlen_attn

    outputs = varlen_attn(queries, keys, values, mask.cu_seqlens, mask.cu_seqlens, mask.max_seqlen, mask.max_seqlen)
    assert isinstance(outputs, Tensor)
    return outputs


def find_varlen_replacement(module: nn.Module) -> nn.Module | None:
    """Return the replacement of a module of a packed encoder, or `None` if it has none."""
    if type(module) is Attention:
        return share_attributes(module, VarlenAttention)
    return find_fused_replacement(module)


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
        self._modules = ModuleSwap(model, find_varlen_replacement)
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
        check_length(longest, self.model.config.context_length)
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
        compile_limit = torch._dynamo.config.patch(recompile_limit=256) if self.compiled else nullcontext()  # noqa: SLF001
        with compile_limit, self._modules:
            segment_ids = segment_row[0][None] if segment_row else None
            states = self._run(row[None], segment_ids, device_cu_seqlens, max_length)[:n]
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
        """Run the model on one row of packed texts and return the states of its tokens."""
        model, mask = self.model, VarlenMask(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, no_empty_rows=True)
        positions = mask.position_ids(ids.shape[1])
        x = model.blocks(model.embedding(ids, positions, segments), positions=positions, mask=mask)
        return model.final_norm(x)[0]

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
