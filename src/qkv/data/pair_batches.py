"""Batches of translation pairs: batch t is a pure function of (seed, t).

Pairs of about one length make a batch, padded to that length's bucket: a batch of short pairs has more rows, and all
batches cost about the same. Each epoch takes every pair once (or as often as asked) in a keyed order. Shapes are few
and never change, so that a compiled step is compiled seldom. In some batches two or three pairs stand in a row one
after the other: the same pairs in fewer, longer rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qkv.choices import SpecialToken
from qkv.data.keyed_random import Indices, Permutation, keyed_integer, rank_row_range
from qkv.data.pair_store import PairStore
from qkv.data.sentence_store import expand_ranges
from qkv.errors import ConfigError, InputError
from qkv.tensors import IGNORE_INDEX, Ids, Patches, SourceIds

_SIZE_MULTIPLE = 8  # lengths and rows are multiples of it: what a GPU's kernels like
_NO_PAIR = -1


@dataclass(frozen=True, kw_only=True)
class PairBatch:
    """Sources are <bos> … <eos>, or pictures.

    `targets[row, i]` follows `ids[row, : i + 1]`, which begins with <bos>.
    """

    source: SourceIds | Patches
    source_lengths: Int[Tensor, "batch"]
    """Tokens of each source; always on the CPU, where counting them makes no GPU wait."""
    ids: Ids
    targets: Ids
    counts: Int[Tensor, "batch"]
    """Targets of each row."""
    full_batch_rows: int
    """Rows that a batch of the longest pairs has."""

    @property
    def n_targets(self) -> int:
        return int(self.counts.sum())

    @property
    def n_tokens(self) -> int:
        """Of sources and targets, without padding."""
        return int(self.source_lengths.sum() + self.counts.sum())

    @property
    def source_attention_mask(self) -> Bool[Tensor, "batch key"]:
        lengths = self.source_lengths.to(self.source.device, non_blocking=True)
        return torch.arange(self.source.shape[1], device=self.source.device) < lengths[:, None]

    def split(self, n_rows: int) -> "Iterator[PairBatch]":
        """In as many parts as n_rows rows of the longest pairs would need."""
        n_parts = -(-self.full_batch_rows // n_rows)
        size = -(-len(self.ids) // n_parts)
        for start in range(0, len(self.ids), size):
            part = slice(start, start + size)
            yield replace(
                self, source=self.source[part], source_lengths=self.source_lengths[part], ids=self.ids[part],
                targets=self.targets[part], counts=self.counts[part],
            )  # fmt: skip

    def to(self, device: torch.device | str) -> "PairBatch":
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in ("source", "ids", "targets")}
        return replace(self, **moved)


@dataclass(frozen=True)
class Bucket:
    """Pairs of about one length."""

    length: int
    """Of every row, unless pairs are joined."""
    rows: int
    pairs: Indices = field(repr=False)

    @property
    def n_batches(self) -> int:
        return -(-len(self.pairs) // self.rows)


@dataclass(frozen=True, kw_only=True)
class PairBatches:
    """Endless: epoch follows epoch, each of the same number of batches."""

    store: PairStore
    repeats: Indices
    """How often an epoch takes each pair."""
    length: int
    """Longest row; longer pairs are left out (`n_too_long`)."""
    batch_size: int
    """Rows of a batch of the longest pairs; a batch of shorter ones has as many tokens in more rows."""
    seed: int
    join_fraction: float = 0.0
    """Share of batches in which pairs are joined, as far as two or three of them fit in a row."""

    def __post_init__(self) -> None:
        if self.length < _SIZE_MULTIPLE or self.batch_size < 1:
            raise ConfigError(
                f"length={self.length} must be at least {_SIZE_MULTIPLE}, batch_size={self.batch_size} at least 1"
            )
        if not self.buckets:
            raise InputError(f"none of {len(self.store)} pairs fits into length={self.length} tokens")

    @cached_property
    def required_lengths(self) -> Indices:
        """Columns that each pair needs: <bos> … <eos> as a source, one less as ids and as targets."""
        return np.maximum(self.store.lengths[0] + 2, self.store.lengths[1] + 1)

    @property
    def n_too_long(self) -> int:
        return int((self.required_lengths > self.length).sum())

    @cached_property
    def buckets(self) -> list[Bucket]:
        """A bucket with too few pairs for one batch is merged into its longer neighbour."""
        buckets: list[Bucket] = []
        pending = np.empty(0, np.int64)
        low = 0
        for high in _bucket_lengths(self.length):
            in_bucket = np.flatnonzero((self.required_lengths > low) & (self.required_lengths <= high))
            pending = np.concatenate([pending, np.repeat(in_bucket, self.repeats[in_bucket])])
            rows = self._rows_for_length(high)
            low = high
            if len(pending) >= rows or (high == self.length and len(pending)):
                buckets.append(Bucket(high, min(rows, _round_up(len(pending), _SIZE_MULTIPLE)), pending))
                pending = pending[:0]
        if len(buckets) > 1 and len(buckets[-1].pairs) < self._rows_for_length(self.length) // 2:
            last, before = buckets.pop(), buckets.pop()
            buckets.append(
                Bucket(last.length, self._rows_for_length(last.length), np.concatenate([before.pairs, last.pairs]))
            )
        return buckets

    @cached_property
    def n_batches(self) -> int:
        """In an epoch."""
        return sum(bucket.n_batches for bucket in self.buckets)

    def batch(self, t: int, *, rank: int = 0, world_size: int = 1) -> PairBatch:
        """This rank's rows of batch t: the ranks' rows in order are the batch of one."""
        if t < 0:
            raise InputError(f"batch {t}: batches are counted from 0")
        epoch, slot = divmod(t, self.n_batches)
        batch_index = int(Permutation(self.n_batches, self.seed, epoch, 0)(np.array([slot]))[0])
        number, first = self._locate_batch(batch_index)
        bucket = self.buckets[number]
        indices = np.arange(first, min(first + bucket.rows, len(bucket.pairs)))
        pairs = bucket.pairs[Permutation(len(bucket.pairs), self.seed, epoch, 2 + number)(indices)]
        n_joined = self._pairs_per_row(bucket, epoch, batch_index)
        rows = _group_into_rows(pairs, n_rows=-(-bucket.rows // n_joined), width=n_joined)
        low, high = rank_row_range(len(rows), rank=rank, world_size=world_size)
        return assemble_pair_batch(
            self.store, rows[low:high], length=n_joined * bucket.length, full_batch_rows=self.batch_size
        )

    def eval_batch(self, t: int) -> PairBatch:
        """Batch t of one epoch for validation: no joining, no filling up, an order that is a fair sample throughout."""
        batch_index = int(Permutation(self.n_batches, 0)(np.array([t]))[0])
        number, first = self._locate_batch(batch_index)
        bucket = self.buckets[number]
        pairs = bucket.pairs[first : first + bucket.rows]
        return assemble_pair_batch(self.store, pairs[:, None], length=bucket.length, full_batch_rows=self.batch_size)

    def _locate_batch(self, batch_index: int) -> tuple[int, int]:
        """The bucket that a batch is of, and the batch's first pair in it."""
        for number, bucket in enumerate(self.buckets):
            if batch_index < bucket.n_batches:
                return number, batch_index * bucket.rows
            batch_index -= bucket.n_batches
        raise AssertionError("a place is one of an epoch's batches")

    def _pairs_per_row(self, bucket: Bucket, epoch: int, batch_index: int) -> int:
        if keyed_integer(1 << 20, self.seed, epoch, 1, batch_index, 0) >= self.join_fraction * (1 << 20):
            return 1
        n_pairs = 2 + keyed_integer(2, self.seed, epoch, 1, batch_index, 1)
        return max(1, min(n_pairs, self.length // bucket.length))

    def _rows_for_length(self, length: int) -> int:
        rows = max(1, self.batch_size * self.length // length)
        # So that rows of two or three pairs come out even.
        step = 24 if rows >= 24 else _SIZE_MULTIPLE if rows >= _SIZE_MULTIPLE else 1
        return rows // step * step


def assemble_pair_batch(store: PairStore, pairs: Indices, *, length: int, full_batch_rows: int) -> PairBatch:
    """The pairs of each row, one after the other, as one; −1 is no pair, and a row of none predicts nothing."""
    sources, n_source = _build_side(store, 0, pairs, width=length)
    outputs, n_target = _build_side(store, 1, pairs, width=length + 1)
    targets = outputs[:, 1:].copy()
    counts = np.where((pairs == _NO_PAIR).all(1), 0, n_target - 1)
    targets[np.arange(length) >= counts[:, None]] = IGNORE_INDEX
    ids = outputs[:, :-1].copy()
    return PairBatch(
        source=torch.from_numpy(sources),
        source_lengths=torch.from_numpy(n_source),
        ids=torch.from_numpy(ids),
        targets=torch.from_numpy(targets),
        counts=torch.from_numpy(counts),
        full_batch_rows=full_batch_rows,
    )


def _build_side(store: PairStore, side: int, pairs: Indices, *, width: int) -> tuple[Indices, Indices]:
    """<bos>, the sentences of each row, <eos>, then padding; and how many of a row are tokens."""
    tokenizer, tokens = store.tokenizers[side], (store.source, store.target)[side]
    lengths = np.where(pairs == _NO_PAIR, 0, store.lengths[side][pairs])
    ends = 1 + np.cumsum(lengths, axis=1)
    rows = np.full((len(pairs), width), tokenizer.special_id(SpecialToken.PAD), np.int64)
    rows[:, 0] = tokenizer.special_id(SpecialToken.BOS)
    rows[np.arange(len(rows)), ends[:, -1]] = tokenizer.special_id(SpecialToken.EOS)
    destinations = expand_ranges(((ends - lengths) + np.arange(len(rows))[:, None] * width).ravel(), lengths.ravel())
    rows.ravel()[destinations] = tokens.take(expand_ranges(store.starts[side][pairs].ravel(), lengths.ravel()))
    return rows, ends[:, -1] + 1


def _group_into_rows(pairs: Indices, *, n_rows: int, width: int) -> Indices:
    """So many pairs a row; what is missing of the last batch of an epoch is no pair, so that shapes stay few."""
    filled = np.full(n_rows * width, _NO_PAIR)
    filled[: len(pairs)] = pairs
    return filled.reshape(n_rows, width)


def _bucket_lengths(length: int) -> Iterator[int]:
    """Where buckets end: narrow ones for the short, which are many."""
    edge = _SIZE_MULTIPLE
    while edge < length:
        yield edge
        edge += _SIZE_MULTIPLE * max(1, edge // 32)
    yield length


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step
