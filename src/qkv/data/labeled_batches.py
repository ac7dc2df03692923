"""Build batches of labeled texts with similar lengths to minimize padding.

Each epoch shuffles the rows, splits them into pools of `BATCHES_PER_POOL` batches, sorts each pool by length and
shuffles the batches. Batch t is a pure function of (seed, t).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from qkv.data.keyed_random import Permutation
from qkv.tensors import AttentionMask, Ids
from qkv.text import Encoding

BATCHES_PER_POOL = 50
"""Number of batches whose rows are sorted together.

A pool of this size is large enough for rows in the same batch to have nearly equal lengths.
"""

Targets = Int[Tensor, "row"] | Float[Tensor, "row"] | Float[Tensor, "row class"]
"""Class indices, regression targets, or multi-hot label vectors."""


class ConcatenatedEncodings:
    """Token sequences of different lengths, concatenated into one array."""

    def __init__(self, rows: Sequence[Encoding]) -> None:
        self.lengths = np.array([len(row.ids) for row in rows], dtype=np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self.ids = np.concatenate([np.array(row.ids, dtype=np.int64) for row in rows])
        self.segments = np.concatenate([np.array(row.segments, dtype=np.int64) for row in rows])

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True, kw_only=True)
class LabeledBatch:
    """A padded batch of labeled texts."""

    ids: Ids
    segments: Ids | None
    """Segment ids for text pairs, or None for single texts."""
    attention_mask: AttentionMask | None
    """Mask that is `False` at padding, or None if all rows have the same length."""
    targets: Targets
    rows: Int[Tensor, "row"]
    """Indices of the rows in the data set."""
    n_tokens: int
    """Number of tokens without padding."""

    @property
    def n_targets(self) -> int:
        return self.targets.numel()

    def split(self, n_rows: int) -> "Iterator[LabeledBatch]":
        for start in range(0, len(self.ids), n_rows):
            part = slice(start, start + n_rows)
            yield replace(
                self,
                ids=self.ids[part],
                segments=None if self.segments is None else self.segments[part],
                attention_mask=None if self.attention_mask is None else self.attention_mask[part],
                targets=self.targets[part],
                rows=self.rows[part],
            )

    def to(self, device: torch.device | str) -> "LabeledBatch":
        return replace(
            self,
            ids=self.ids.to(device, non_blocking=True),
            segments=None if self.segments is None else self.segments.to(device, non_blocking=True),
            attention_mask=None if self.attention_mask is None else self.attention_mask.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
        )


class LengthGroupedLabeledBatches:
    """Source of endless training batches, and of evaluation batches that contain each row once."""

    def __init__(
        self,
        sequences: ConcatenatedEncodings,
        targets: Targets,
        *,
        batch_size: int,
        seed: int,
        pad_id: int,
        width_multiple: int = 1,
        max_width: int | None = None,
    ) -> None:
        """Prepare to create batches of the given sequences.

        Batch widths are rounded up to a multiple of `width_multiple` for efficient GPU use, but limited to `max_width`.
        """
        self._sequences = sequences
        self._targets = targets
        self._batch_size = batch_size
        self._seed = seed
        self._pad_id = pad_id
        self._width_multiple = width_multiple
        self._max_width = max_width or width_multiple * int(sequences.lengths.max())
        self._epoch_batches = lru_cache(maxsize=2)(self._shuffle_grouped_by_length)

    @property
    def n_batches(self) -> int:
        """Number of batches per epoch. One batch may be smaller than the others."""
        return -(-len(self._sequences) // self._batch_size)

    def batch(self, t: int) -> LabeledBatch:
        epoch, number = divmod(t, self.n_batches)
        return self._build_padded_batch(self._epoch_batches(epoch)[number])

    def eval_batches_sorted_by_length(self, n_rows: int) -> Iterator[LabeledBatch]:
        """Yield batches of up to `n_rows` rows, sorted by length. Each row occurs in exactly one batch."""
        by_length = np.argsort(self._sequences.lengths, kind="stable")
        for start in range(0, len(by_length), n_rows):
            yield self._build_padded_batch(by_length[start : start + n_rows])

    def _shuffle_grouped_by_length(self, epoch: int) -> list[NDArray[np.int64]]:
        n = len(self._sequences)
        rows = Permutation(n, self._seed, epoch, 0)(np.arange(n))
        pools = np.arange(n) // (BATCHES_PER_POOL * self._batch_size)
        rows = rows[np.lexsort((self._sequences.lengths[rows], pools))]
        batches = Permutation(self.n_batches, self._seed, epoch, 1)(np.arange(self.n_batches))
        return [rows[number * self._batch_size : (number + 1) * self._batch_size] for number in batches]

    def _build_padded_batch(self, rows: NDArray[np.int64]) -> LabeledBatch:
        sequences = self._sequences
        lengths = sequences.lengths[rows]
        width = min(-(-int(lengths.max()) // self._width_multiple) * self._width_multiple, self._max_width)
        columns = np.arange(width)
        attention_mask = columns < lengths[:, None]
        indices = np.where(attention_mask, sequences.starts[rows][:, None] + columns, 0)
        segments = sequences.segments[indices] * attention_mask
        return LabeledBatch(
            ids=torch.from_numpy(np.where(attention_mask, sequences.ids[indices], self._pad_id)),
            segments=torch.from_numpy(segments) if segments.any() else None,
            attention_mask=None if attention_mask.all() else torch.from_numpy(attention_mask),
            targets=self._targets[torch.from_numpy(rows)],
            rows=torch.from_numpy(rows),
            n_tokens=int(lengths.sum()),
        )
