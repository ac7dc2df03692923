"""Next-token batches out of a token store: batch t is a pure function of (seed, t).

An epoch cuts the tokens, seen as a ring, into windows from a random offset on, and takes the windows in a keyed
order. Each token is the target of exactly one window an epoch. Nothing is stored or shuffled, so any step can be
had at once, on any number of workers, from a corpus of any size.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from qkv.data.keyed_random import Permutation, keyed_integer, rank_row_range
from qkv.data.token_store import TokenSource
from qkv.errors import ConfigError, InputError
from qkv.tensors import IGNORE_INDEX, Ids


@dataclass(frozen=True)
class TokenBatch:
    """`targets[row, i]` is the token that follows `ids[row, i]`, or IGNORE_INDEX."""

    ids: Ids
    targets: Ids
    document_ids: Ids | None
    """Which document each position works for: that of its target. The end token before a document is therefore
    its first position, from which its first token is predicted. None: attention crosses documents."""
    counts: Int[Tensor, "batch"]
    """Targets in each row."""

    @property
    def n_targets(self) -> int:
        return int(self.counts.sum())

    @property
    def n_tokens(self) -> int:
        return self.ids.numel()

    def split(self, n_rows: int) -> "Iterator[Batch]":
        """The batch in parts of n_rows rows."""
        for start in range(0, len(self.ids), n_rows):
            part = slice(start, start + n_rows)
            document_ids = None if self.document_ids is None else self.document_ids[part]
            yield TokenBatch(self.ids[part], self.targets[part], document_ids, self.counts[part])

    def to(self, device: torch.device | str) -> "Batch":
        return replace(
            self,
            ids=self.ids.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
            document_ids=None if self.document_ids is None else self.document_ids.to(device, non_blocking=True),
        )


@dataclass(frozen=True, kw_only=True)
class TokenBatches:
    """Endless: epoch follows epoch, and a batch may hold the end of one and the start of the next."""

    source: TokenSource
    context_length: int
    batch_size: int
    seed: int
    cross_documents: bool = True
    """False numbers the documents, so that attention stays within one."""

    def __post_init__(self) -> None:
        _check_batch_sizes(self.source, self.context_length, self.batch_size)

    @property
    def n_windows(self) -> int:
        """In an epoch; the last one is shorter where the length does not divide the tokens."""
        return -(-self.source.n_tokens // self.context_length)

    def epoch(self, t: int) -> float:
        """How many times the text has been seen when batch t begins."""
        return t * self.batch_size / self.n_windows

    def batch(self, t: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        """This rank's rows of batch t: the ranks' rows in order are the batch of one."""
        if t < 0:
            raise InputError(f"batch {t}: batches are counted from 0")
        first, last = rank_row_range(self.batch_size, rank=rank, world_size=world_size)
        numbers = np.arange(first, last, dtype=np.int64) + t * self.batch_size
        starts, lengths = np.empty_like(numbers), np.empty_like(numbers)
        epochs, windows = np.divmod(numbers, self.n_windows)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            ordered = Permutation(self.n_windows, self.seed, int(epoch), 0)(windows[in_epoch])
            offset = keyed_integer(self.source.n_tokens, self.seed, int(epoch), 1)
            starts[in_epoch] = offset + ordered * self.context_length
            lengths[in_epoch] = np.minimum(self.context_length, self.source.n_tokens - ordered * self.context_length)
        rows = [self._read_window(int(start)) for start in starts]
        return _assemble_token_batch(rows, lengths, with_documents=not self.cross_documents)

    def _read_window(self, start: int) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """context_length + 1 tokens from `start` on around the ring, and the targets' documents."""
        n = self.source.n_tokens
        tokens, document_ids = [], []
        for lap, low, high in _wrap_range(start, self.context_length + 1, n):
            tokens.append(self.source.read(low, high))
            if not self.cross_documents:
                # Counted on past the ring's end: the text's end and its beginning are two documents, even of one.
                laps_ahead = lap - (start + 1) // n
                document_ids.append(self.source.document_ids(low, high) + laps_ahead * self.source.n_documents)
        return np.concatenate(tokens), np.concatenate(document_ids)[1:] if document_ids else None


@dataclass(frozen=True, kw_only=True)
class EvalTokenBatches:
    """Every token once, in order, for validation; the first is predicted from the end token."""

    source: TokenSource
    context_length: int
    batch_size: int
    cross_documents: bool = True

    def __post_init__(self) -> None:
        _check_batch_sizes(self.source, self.context_length, self.batch_size)

    def __len__(self) -> int:
        return (self.source.n_tokens - 1) // (self.context_length * self.batch_size) + 1

    def __iter__(self) -> Iterator[TokenBatch]:
        return (self.batch(t) for t in range(len(self)))

    def batch(self, t: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        """As `TokenBatches.batch`; the last batch may have fewer rows, and a rank then none."""
        if not 0 <= t < len(self):
            raise InputError(f"batch {t} of a sweep of {len(self)}")
        n_windows = -(-self.source.n_tokens // self.context_length)
        first = t * self.batch_size
        low, high = rank_row_range(min(self.batch_size, n_windows - first), rank=rank, world_size=world_size)
        starts = np.arange(first + low, first + high, dtype=np.int64) * self.context_length
        lengths = np.minimum(self.context_length, self.source.n_tokens - starts)
        rows = [self._read_window(int(start), int(length)) for start, length in zip(starts, lengths, strict=True)]
        if not rows:
            return self._empty_batch()
        return _assemble_token_batch(rows, lengths, with_documents=not self.cross_documents)

    def _read_window(self, start: int, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """Tokens start − 1 … start + length − 1, filled up at the end with end tokens."""
        end = np.array([self.source.end_id], dtype=np.int64)
        before = end if start == 0 else self.source.read(start - 1, start)
        missing = self.context_length - length
        tokens = np.concatenate([before, self.source.read(start, start + length), np.repeat(end, missing)])
        if self.cross_documents:
            return tokens, None
        document_ids = self.source.document_ids(start, start + length)
        return tokens, np.concatenate([document_ids, np.repeat(document_ids[-1:], missing)])

    def _empty_batch(self) -> TokenBatch:
        none = torch.empty(0, self.context_length, dtype=torch.int64)
        document_ids = None if self.cross_documents else none
        return TokenBatch(ids=none, targets=none, document_ids=document_ids, counts=torch.empty(0, dtype=torch.int64))


def _check_batch_sizes(source: TokenSource, context_length: int, batch_size: int) -> None:
    if context_length < 1 or batch_size < 1:
        raise ConfigError(f"context_length={context_length} and batch_size={batch_size} must be at least 1")
    if source.n_tokens < 1:
        raise ConfigError("the token store is empty")


def _wrap_range(start: int, length: int, n: int) -> Iterator[tuple[int, int, int]]:
    """(turn, from, to) for each stretch of [start, start + length) on a ring of n."""
    stop = start + length
    while start < stop:
        lap, low = divmod(start, n)
        high = min(n, low + stop - start)
        yield lap, low, high
        start += high - low


def _assemble_token_batch(
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
