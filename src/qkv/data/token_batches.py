"""Build batches for next-token prediction from a token store.

Each epoch treats the tokens as a ring, splits the ring into windows starting at a random offset, and visits the windows
in random order. Each token is the target in exactly one window per epoch. Batch t is a pure function of (seed, t), so
any batch can be computed directly, with any number of workers and for a corpus of any size.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from qkv.data.sampler import Permutation, keyed_integer, rank_row_range
from qkv.data.token_store import TokenSource
from qkv.errors import ConfigError, InputError
from qkv.tensors import IGNORE_INDEX, Ids


@dataclass(frozen=True)
class TokenBatch:
    """A batch for next-token prediction. `targets[row, i]` is the token that follows `ids[row, i]`, or IGNORE_INDEX."""

    ids: Ids
    targets: Ids
    document_ids: Ids | None
    """Document number of the target at each position, or None if attention crosses document boundaries.

    The end token before a document is assigned to that document because the document's first token is predicted from
    it.
    """
    counts: Int[Tensor, "batch"]
    """Number of targets in each row."""

    @property
    def n_targets(self) -> int:
        return int(self.counts.sum())

    @property
    def n_tokens(self) -> int:
        return self.ids.numel()

    def split(self, n_rows: int) -> "Iterator[TokenBatch]":
        """Split the batch into micro-batches of `n_rows` rows."""
        for start in range(0, len(self.ids), n_rows):
            part = slice(start, start + n_rows)
            document_ids = None if self.document_ids is None else self.document_ids[part]
            yield TokenBatch(self.ids[part], self.targets[part], document_ids, self.counts[part])

    def to(self, device: torch.device | str) -> "TokenBatch":
        return replace(
            self,
            ids=self.ids.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
            document_ids=None if self.document_ids is None else self.document_ids.to(device, non_blocking=True),
        )


@dataclass(frozen=True, kw_only=True)
class TokenBatches:
    """An endless sequence of training batches. A batch may span the end of one epoch and the start of the next."""

    source: TokenSource
    seq_len: int
    batch_size: int
    seed: int
    cross_documents: bool = True
    """Whether attention crosses document boundaries. If False, batches contain document ids."""

    def __post_init__(self) -> None:
        _check_sizes_at_least_one(self.source, self.seq_len, self.batch_size)

    @property
    def n_windows(self) -> int:
        """Number of windows per epoch. The last window may be shorter than the others."""
        return -(-self.source.n_tokens // self.seq_len)

    def epoch(self, t: int) -> float:
        """Return the (fractional) number of epochs completed before batch t."""
        return t * self.batch_size / self.n_windows

    def batch(self, t: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        """Return this rank's rows of batch t. Concatenating the rows of all ranks gives the full batch."""
        if t < 0:
            raise InputError(f"the batch number must not be negative, got {t}")
        first, last = rank_row_range(self.batch_size, rank=rank, world_size=world_size)
        numbers = np.arange(first, last, dtype=np.int64) + t * self.batch_size
        starts, lengths = np.empty_like(numbers), np.empty_like(numbers)
        epochs, windows = np.divmod(numbers, self.n_windows)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            ordered = Permutation(self.n_windows, self.seed, int(epoch), 0)(windows[in_epoch])
            offset = keyed_integer(self.source.n_tokens, self.seed, int(epoch), 1)
            starts[in_epoch] = offset + ordered * self.seq_len
            lengths[in_epoch] = np.minimum(self.seq_len, self.source.n_tokens - ordered * self.seq_len)
        rows = [self._read_ring_window_and_document_ids(int(start)) for start in starts]
        return _split_inputs_and_targets(rows, lengths, with_documents=not self.cross_documents)

    def _read_ring_window_and_document_ids(self, start: int) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """Return seq_len + 1 tokens of the ring, starting at `start`, and the document ids of the targets."""
        n = self.source.n_tokens
        tokens, document_ids = [], []
        for lap, low, high in _split_range_by_lap(start, self.seq_len + 1, n):
            tokens.append(self.source.read(low, high))
            if not self.cross_documents:
                # Continue the numbering past the end of the ring. The end and the start of the text must count as
                # different documents even if there is only one document.
                laps_ahead = lap - (start + 1) // n
                document_ids.append(self.source.document_ids(low, high) + laps_ahead * self.source.n_documents)
        return np.concatenate(tokens), np.concatenate(document_ids)[1:] if document_ids else None


@dataclass(frozen=True, kw_only=True)
class EvalTokenBatches:
    """Validation batches that contain each token once, in order. The first token is predicted from an end token."""

    source: TokenSource
    seq_len: int
    batch_size: int
    cross_documents: bool = True

    def __post_init__(self) -> None:
        _check_sizes_at_least_one(self.source, self.seq_len, self.batch_size)

    def __len__(self) -> int:
        return (self.source.n_tokens - 1) // (self.seq_len * self.batch_size) + 1

    def __iter__(self) -> Iterator[TokenBatch]:
        return (self.batch(t) for t in range(len(self)))

    def batch(self, t: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        """Return this rank's rows of batch t. A rank may have no rows in the last batch."""
        if not 0 <= t < len(self):
            raise InputError(f"batch {t} is out of range for {len(self)} batches")
        n_windows = -(-self.source.n_tokens // self.seq_len)
        first = t * self.batch_size
        low, high = rank_row_range(min(self.batch_size, n_windows - first), rank=rank, world_size=world_size)
        starts = np.arange(first + low, first + high, dtype=np.int64) * self.seq_len
        lengths = np.minimum(self.seq_len, self.source.n_tokens - starts)
        rows = [
            self._read_from_previous_token(int(start), int(length))
            for start, length in zip(starts, lengths, strict=True)
        ]
        if not rows:
            return self._empty_batch()
        return _split_inputs_and_targets(rows, lengths, with_documents=not self.cross_documents)

    def _read_from_previous_token(self, start: int, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """Return the tokens at positions start − 1 to start + length − 1 and their document ids.

        End tokens are used as padding.
        """
        end = np.array([self.source.end_id], dtype=np.int64)
        before = end if start == 0 else self.source.read(start - 1, start)
        missing = self.seq_len - length
        tokens = np.concatenate([before, self.source.read(start, start + length), np.repeat(end, missing)])
        if self.cross_documents:
            return tokens, None
        document_ids = self.source.document_ids(start, start + length)
        return tokens, np.concatenate([document_ids, np.repeat(document_ids[-1:], missing)])

    def _empty_batch(self) -> TokenBatch:
        none = torch.empty(0, self.seq_len, dtype=torch.int64)
        document_ids = None if self.cross_documents else none
        return TokenBatch(ids=none, targets=none, document_ids=document_ids, counts=torch.empty(0, dtype=torch.int64))


def _check_sizes_at_least_one(source: TokenSource, seq_len: int, batch_size: int) -> None:
    if seq_len < 1 or batch_size < 1:
        raise ConfigError(
            f"seq_len and batch_size must be at least 1, got seq_len={seq_len} and batch_size={batch_size}"
        )
    if source.n_tokens < 1:
        raise ConfigError("the token store is empty (n_tokens=0)")


def _split_range_by_lap(start: int, length: int, n: int) -> Iterator[tuple[int, int, int]]:
    """Split [start, start + length) on a ring of n tokens by lap, and yield (lap, start, stop) for each part."""
    stop = start + length
    while start < stop:
        lap, low = divmod(start, n)
        high = min(n, low + stop - start)
        yield lap, low, high
        start += high - low


def _split_inputs_and_targets(
    rows: list[tuple[NDArray[np.int64], NDArray[np.int64] | None]],
    lengths: NDArray[np.int64],
    *,
    with_documents: bool,
) -> TokenBatch:
    tokens = np.stack([row for row, _ in rows])
    targets = tokens[:, 1:].copy()
    targets[np.arange(targets.shape[1]) >= lengths[:, None]] = IGNORE_INDEX
    document_ids = np.stack([numbers for _, numbers in rows if numbers is not None]) if with_documents else None
    return TokenBatch(
        ids=torch.from_numpy(tokens[:, :-1].copy()),
        targets=torch.from_numpy(targets),
        document_ids=None if document_ids is None else torch.from_numpy(document_ids),
        counts=torch.from_numpy(lengths.copy()),
    )
