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
from numpy.typing import NDArray
from torch import Tensor

from qkv.choices import Role
from qkv.data.order import Permutation, keyed_integer, rank_rows
from qkv.data.pair_store import PairStore
from qkv.data.sentence_store import stretches
from qkv.data.windows import NOTHING
from qkv.errors import ConfigError, InputError
from qkv.tensors import Ids, Patches, SourceIds

Numbers = NDArray[np.int64]

_STEP = 8  # lengths and rows are multiples of it: what a GPU's kernels like
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
    n_full: int
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
        n_parts = -(-self.n_full // n_rows)
        size = -(-len(self.ids) // n_parts)
        for start in range(0, len(self.ids), size):
            part = slice(start, start + size)
            yield replace(
                self, source=self.source[part], source_lengths=self.source_lengths[part], ids=self.ids[part],
                targets=self.targets[part], counts=self.counts[part],
            )  # fmt: skip

    def to(self, device: torch.device | str) -> "PairBatch":
        there = {name: getattr(self, name).to(device, non_blocking=True) for name in ("source", "ids", "targets")}
        return replace(self, **there)


@dataclass(frozen=True)
class Bucket:
    """Pairs of about one length."""

    length: int
    """Of every row, unless pairs are joined."""
    rows: int
    pairs: Numbers = field(repr=False)

    @property
    def n_batches(self) -> int:
        return -(-len(self.pairs) // self.rows)


@dataclass(frozen=True, kw_only=True)
class PairBatches:
    """Endless: epoch follows epoch, each of the same number of batches."""

    store: PairStore
    times: Numbers
    """How often an epoch takes each pair."""
    length: int
    """Longest row; longer pairs are left out (`n_too_long`)."""
    batch_size: int
    """Rows of a batch of the longest pairs; a batch of shorter ones has as many tokens in more rows."""
    seed: int
    join: float = 0.0
    """Share of batches in which pairs are joined, as far as two or three of them fit in a row."""

    def __post_init__(self) -> None:
        if self.length < _STEP or self.batch_size < 1:
            raise ConfigError(f"length={self.length} must be at least {_STEP}, batch_size={self.batch_size} at least 1")
        if not self.buckets:
            raise InputError(f"none of {len(self.store)} pairs fits into length={self.length} tokens")

    @cached_property
    def needed(self) -> Numbers:
        """Columns that each pair needs: <bos> … <eos> as a source, one less as ids and as targets."""
        return np.maximum(self.store.lengths[0] + 2, self.store.lengths[1] + 1)

    @property
    def n_too_long(self) -> int:
        return int((self.needed > self.length).sum())

    @cached_property
    def buckets(self) -> list[Bucket]:
        """A bucket with too few pairs for one batch is merged into its longer neighbour."""
        buckets: list[Bucket] = []
        waiting = np.empty(0, np.int64)
        low = 0
        for high in _edges(self.length):
            inside = np.flatnonzero((self.needed > low) & (self.needed <= high))
            waiting = np.concatenate([waiting, np.repeat(inside, self.times[inside])])
            rows = self._rows(high)
            low = high
            if len(waiting) >= rows or (high == self.length and len(waiting)):
                buckets.append(Bucket(high, min(rows, _up(len(waiting), _STEP)), waiting))
                waiting = waiting[:0]
        if len(buckets) > 1 and len(buckets[-1].pairs) < self._rows(self.length) // 2:
            last, before = buckets.pop(), buckets.pop()
            buckets.append(Bucket(last.length, self._rows(last.length), np.concatenate([before.pairs, last.pairs])))
        return buckets

    @cached_property
    def n_batches(self) -> int:
        """In an epoch."""
        return sum(bucket.n_batches for bucket in self.buckets)

    def batch(self, t: int, *, rank: int = 0, world: int = 1) -> PairBatch:
        """This rank's rows of batch t: the ranks' rows in order are the batch of one."""
        if t < 0:
            raise InputError(f"batch {t}: batches are counted from 0")
        epoch, slot = divmod(t, self.n_batches)
        place = int(Permutation(self.n_batches, self.seed, epoch, 0)(np.array([slot]))[0])
        number, first = self._bucket_of(place)
        bucket = self.buckets[number]
        asked = np.arange(first, min(first + bucket.rows, len(bucket.pairs)))
        pairs = bucket.pairs[Permutation(len(bucket.pairs), self.seed, epoch, 2 + number)(asked)]
        n_joined = self._n_joined(bucket, epoch, place)
        rows = _in_rows(pairs, n_rows=-(-bucket.rows // n_joined), width=n_joined)
        low, high = rank_rows(len(rows), rank=rank, world=world)
        return assemble(self.store, rows[low:high], length=n_joined * bucket.length, n_full=self.batch_size)

    def sweep(self, t: int) -> PairBatch:
        """Batch t of one epoch for validation: no joining, no filling up, an order that is a fair sample throughout."""
        place = int(Permutation(self.n_batches, 0)(np.array([t]))[0])
        number, first = self._bucket_of(place)
        bucket = self.buckets[number]
        pairs = bucket.pairs[first : first + bucket.rows]
        return assemble(self.store, pairs[:, None], length=bucket.length, n_full=self.batch_size)

    def _bucket_of(self, place: int) -> tuple[int, int]:
        """The bucket that a batch is of, and the batch's first pair in it."""
        for number, bucket in enumerate(self.buckets):
            if place < bucket.n_batches:
                return number, place * bucket.rows
            place -= bucket.n_batches
        raise AssertionError("a place is one of an epoch's batches")

    def _n_joined(self, bucket: Bucket, epoch: int, place: int) -> int:
        if keyed_integer(1 << 20, self.seed, epoch, 1, place, 0) >= self.join * (1 << 20):
            return 1
        wanted = 2 + keyed_integer(2, self.seed, epoch, 1, place, 1)
        return max(1, min(wanted, self.length // bucket.length))

    def _rows(self, length: int) -> int:
        rows = max(1, self.batch_size * self.length // length)
        # So that rows of two or three pairs come out even.
        step = 24 if rows >= 24 else _STEP if rows >= _STEP else 1
        return rows // step * step


def assemble(store: PairStore, pairs: Numbers, *, length: int, n_full: int) -> PairBatch:
    """The pairs of each row, one after the other, as one; −1 is no pair, and a row of none predicts nothing."""
    sources, n_source = _written(store, 0, pairs, width=length)
    outputs, n_target = _written(store, 1, pairs, width=length + 1)
    targets = outputs[:, 1:].copy()
    counts = np.where((pairs == _NO_PAIR).all(1), 0, n_target - 1)
    targets[np.arange(length) >= counts[:, None]] = NOTHING
    ids = outputs[:, :-1].copy()
    return PairBatch(
        source=torch.from_numpy(sources),
        source_lengths=torch.from_numpy(n_source),
        ids=torch.from_numpy(ids),
        targets=torch.from_numpy(targets),
        counts=torch.from_numpy(counts),
        n_full=n_full,
    )


def _written(store: PairStore, side: int, pairs: Numbers, *, width: int) -> tuple[Numbers, Numbers]:
    """<bos>, the sentences of each row, <eos>, then padding; and how many of a row are tokens."""
    tokenizer, tokens = store.tokenizers[side], (store.source, store.target)[side]
    lengths = np.where(pairs == _NO_PAIR, 0, store.lengths[side][pairs])
    ends = 1 + np.cumsum(lengths, axis=1)
    rows = np.full((len(pairs), width), tokenizer.id_of(Role.PAD), np.int64)
    rows[:, 0] = tokenizer.id_of(Role.BEGIN)
    rows[np.arange(len(rows)), ends[:, -1]] = tokenizer.id_of(Role.END)
    into = stretches(((ends - lengths) + np.arange(len(rows))[:, None] * width).ravel(), lengths.ravel())
    rows.ravel()[into] = tokens.take(stretches(store.starts[side][pairs].ravel(), lengths.ravel()))
    return rows, ends[:, -1] + 1


def _in_rows(pairs: Numbers, *, n_rows: int, width: int) -> Numbers:
    """So many pairs a row; what is missing of the last batch of an epoch is no pair, so that shapes stay few."""
    filled = np.full(n_rows * width, _NO_PAIR)
    filled[: len(pairs)] = pairs
    return filled.reshape(n_rows, width)


def _edges(length: int) -> Iterator[int]:
    """Where buckets end: narrow ones for the short, which are many."""
    edge = _STEP
    while edge < length:
        yield edge
        edge += _STEP * max(1, edge // 32)
    yield length


def _up(n: int, step: int) -> int:
    return -(-n // step) * step
