"""How does a GPU read texts of unequal lengths? One after another in one row, of which nothing is padding."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from qkv.generation.cuda_decode_forward import power_of_two
from qkv.models import BERT
from qkv.nn import Varlen
from qkv.tensors import Residual

MAX_TOKENS_PER_ROW = 1 << 14
"""Of a row: enough to keep a large GPU busy."""
MAX_TEXTS_PER_ROW = 512
"""Of a row, at most."""
ROW_MULTIPLE = 128
"""Rows are filled up to a multiple of it, where they are not filled up to a power of two."""
COPY_ALIGNMENT = 16
"""Bytes: a compiled graph copies what begins elsewhere."""

TokenRows = Sequence[Sequence[int]]


def can_pack(model: BERT) -> bool:
    """Whether torch has the kernel: for 16-bit numbers on a GPU, heads of one shape, and no rule but the text's own."""
    weight, config = model.embedding.token.weight, model.config
    is_plain = model.relative_positions is None and config.sliding_window is None and config.scale_scores
    is_plain = is_plain and (config.n_heads, config.d_head) == (config.n_kv_heads, config.d_value)
    return weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16) and is_plain


def pack_by_length(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Each place of `lengths` once, from short to long, in rows of at most TOKENS tokens and TEXTS texts."""
    row: list[int] = []
    n_tokens = 0
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        if row and (n_tokens + lengths[place] > MAX_TOKENS_PER_ROW or len(row) == MAX_TEXTS_PER_ROW):
            yield row
            row, n_tokens = [], 0
        row.append(place)
        n_tokens += lengths[place]
    if row:
        yield row


class PackedEncoder:
    """A model's states of texts that it reads in one row.

    `compiled`: by one graph for each size that comes. Each takes many seconds to be made, once; then it is faster.
    """

    def __init__(self, model: BERT, *, compiled: bool = False) -> None:
        self.model = model
        self.compiled = compiled
        self._device = model.embedding.token.weight.device
        self._run: Callable[..., Tensor] = self._states
        if compiled:
            self._run = torch.compile(self._states, dynamic=False, fullgraph=True, mode="reduce-overhead")

    @torch.no_grad()
    def states(self, ids: TokenRows, segments: TokenRows | None = None) -> Residual:
        """(text, place, d_model), zeros after each text's end."""
        lengths = np.fromiter((len(row) for row in ids), np.int64, len(ids))
        n, n_texts, longest = int(lengths.sum()), len(ids), int(lengths.max())
        size, room, most = self._size(n, n_texts, longest)
        # What fills the row up is texts, too, as long as may be, and after them empty ones.
        after = n + most * np.arange(room - n_texts + 1)
        edges = np.concatenate(([0], lengths.cumsum()[:-1], after.clip(max=size))).astype(np.int32)
        is_table = n == n_texts * longest
        # Where each token will stand in a table with a row for each text.
        place = np.arange(n) - np.repeat(edges[:n_texts] - np.arange(n_texts) * longest, lengths)
        given = [_flatten_rows(rows, n, size) for rows in (ids, segments) if rows is not None]
        starts, places, row, *parts = self._sent(edges, place[: 0 if is_table else n], *given)
        # Powers of two of tokens, texts and the longest text: over a hundred may come; torch fails at the ninth.
        with torch._dynamo.config.patch(recompile_limit=256) if self.compiled else nullcontext():  # noqa: SLF001
            found = self._run(row[None], parts[0][None] if parts else None, starts, most)[:n]
        if is_table:
            # A copy: the graph's next run writes over what it gave.
            return found.clone().view(n_texts, longest, -1)
        table = found.new_zeros(n_texts * longest, found.shape[-1])
        return table.index_copy_(0, places, found).view(n_texts, longest, -1)

    def _size(self, n: int, n_texts: int, longest: int) -> tuple[int, int, int]:
        """The row's tokens, its texts, and the most tokens of a text: of a compiled graph, few different ones."""
        if not self.compiled:
            size = -(-n // ROW_MULTIPLE) * ROW_MULTIPLE
            return size, n_texts + -(-(size - n) // longest), longest
        size = max(power_of_two(n), 8 * ROW_MULTIPLE)
        most = min(max(power_of_two(longest), ROW_MULTIPLE), self.model.config.context_length)
        # Room for what fills the row up, of all but the least size less than half, and no more: empty texts cost time.
        n_fillers = size // most // (2 if 2 * n > size else 1) + 1
        return size, power_of_two(n_texts) + n_fillers, most

    def _states(self, ids: Tensor, segments: Tensor | None, starts: Tensor, longest: int) -> Tensor:
        return self.model(ids, segments=segments, documents=Varlen(cu_seqlens=starts, max_seqlen=longest))[0]

    def _sent(self, *given: np.ndarray) -> list[Tensor]:
        """On the model's device, by one copy: each copy has its price, however little it carries."""
        *starts, n = accumulate((-(-part.nbytes // COPY_ALIGNMENT) * COPY_ALIGNMENT for part in given), initial=0)
        places = [slice(start, start + part.nbytes) for start, part in zip(starts, given, strict=True)]
        # Of torch's own store of pinned memory, which gives none out anew before its copy has ended.
        here = torch.empty(n, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        for place, part in zip(places, given, strict=True):
            here.numpy()[place] = part.view(np.uint8)
        there = here.to(self._device, non_blocking=True)
        return [there[place].view(torch.from_numpy(part).dtype) for place, part in zip(places, given, strict=True)]


def _flatten_rows(rows: TokenRows, n: int, size: int) -> np.ndarray:
    """All of them one after another, zeros up to the size."""
    flat = np.zeros(size, np.int64)
    flat[:n] = np.fromiter(chain.from_iterable(rows), np.int64, n)
    return flat
