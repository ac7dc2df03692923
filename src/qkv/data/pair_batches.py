"""Build batches of translation pairs with similar lengths.

Pairs are grouped into buckets by length. All batches of a bucket are padded to the same length. Batches of shorter
pairs have more rows, so all batches cost about the same. The number of different shapes is small, which limits
recompilations of a compiled training step. In some batches, two or three pairs are concatenated into one row. Batch t
is a pure function of (seed, t).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qkv.choices import SpecialToken
from qkv.data.pair_store import PairStore
from qkv.data.sampler import Indices, Permutation, keyed_integer, rank_row_range
from qkv.data.sentence_store import expand_ranges
from qkv.errors import ConfigError, InputError
from qkv.tensors import IGNORE_INDEX, Ids, Patches, SourceIds

_SIZE_MULTIPLE = 8  # lengths and numbers of rows are multiples of this size for efficient GPU kernels
_NO_PAIR = -1


@dataclass(frozen=True, kw_only=True)
class PairBatch:
    """A padded batch of translation pairs.

    Sources are token ids (<bos> … <eos>) or image patches. The decoder inputs `ids` start with <bos>, and
    `targets[row, i]` is the token that follows `ids[row, i]`.
    """

    source: SourceIds | Patches
    source_lengths: Int[Tensor, "batch"]
    """Number of tokens in each source.

    The tensor is always on the CPU, so reading it does not synchronize with the GPU.
    """
    ids: Ids
    targets: Ids
    counts: Int[Tensor, "batch"]
    """Number of targets in each row."""
    n_rows_at_max_length: int
    """Number of rows in a batch of the longest pairs."""

    @property
    def n_targets(self) -> int:
        return int(self.counts.sum())

    @property
    def n_tokens(self) -> int:
        """Total number of source and target tokens, excluding padding."""
        return int(self.source_lengths.sum() + self.counts.sum())

    @property
    def source_attention_mask(self) -> Bool[Tensor, "batch key"]:
        lengths = self.source_lengths.to(self.source.device, non_blocking=True)
        return torch.arange(self.source.shape[1], device=self.source.device) < lengths[:, None]

    def split(self, n_rows: int) -> "Iterator[PairBatch]":
        """Split the batch into micro-batches.

        The number of micro-batches is the same as for a batch of the longest pairs split into `n_rows` rows each.
        """
        n_parts = -(-self.n_rows_at_max_length // n_rows)
        size = -(-len(self.ids) // n_parts)
        for start in range(0, len(self.ids), size):
            part = slice(start, start + size)
            yield replace(
                self, source=self.source[part], source_lengths=self.source_lengths[part], ids=self.ids[part],
                targets=self.targets[part], counts=self.counts[part],
            )  # fmt: skip

    def to(self, device: torch.device | str) -> "PairBatch":
        tensors = {name: getattr(self, name).to(device, non_blocking=True) for name in ("source", "ids", "targets")}
        return replace(self, **tensors)


@dataclass(frozen=True)
class LengthBucket:
    """Group of pairs with similar lengths."""

    row_length: int
    """Length of each row when pairs are not concatenated."""
    rows_per_batch: int
    pair_indices: Indices = field(repr=False)

    @property
    def n_batches(self) -> int:
        return -(-len(self.pair_indices) // self.rows_per_batch)


@dataclass(frozen=True, kw_only=True)
class PairBatches:
    """An endless sequence of translation batches. All epochs have the same number of batches."""

    store: PairStore
    repeats: Indices
    """Number of times that each pair is used per epoch."""
    seq_len: int
    """Maximum row length. Longer pairs are skipped and counted in `n_too_long`."""
    batch_size: int
    """Number of rows in a batch of the longest pairs. Batches of shorter pairs have more rows, but as many tokens."""
    seed: int
    join_fraction: float = 0.0
    """Fraction of batches in which two or three pairs are concatenated into each row if they fit."""

    def __post_init__(self) -> None:
        if self.seq_len < _SIZE_MULTIPLE or self.batch_size < 1:
            raise ConfigError(
                f"seq_len must be at least {_SIZE_MULTIPLE} and batch_size at least 1, "
                f"got seq_len={self.seq_len} and batch_size={self.batch_size}"
            )
        if not self.buckets:
            raise InputError(f"all {len(self.store)} pairs are longer than seq_len={self.seq_len} tokens")

    @cached_property
    def required_lengths(self) -> Indices:
        """Row length that each pair requires, including two special tokens for the source and one for the target."""
        return np.maximum(self.store.lengths[0] + 2, self.store.lengths[1] + 1)

    @property
    def n_too_long(self) -> int:
        """Number of pairs skipped because they are too long."""
        return int((self.required_lengths > self.seq_len).sum())

    @cached_property
    def buckets(self) -> list[LengthBucket]:
        """Buckets of pairs with similar lengths.

        A bucket with too few pairs for a batch is merged into the bucket with the next larger length.
        """
        buckets: list[LengthBucket] = []
        pending = np.empty(0, np.int64)
        low = 0
        for high in _bucket_max_lengths(self.seq_len):
            in_bucket = np.flatnonzero((self.required_lengths > low) & (self.required_lengths <= high))
            pending = np.concatenate([pending, np.repeat(in_bucket, self.repeats[in_bucket])])
            rows = self._n_rows_within_token_budget(high)
            low = high
            if len(pending) >= rows or (high == self.seq_len and len(pending)):
                buckets.append(LengthBucket(high, min(rows, _round_up(len(pending), _SIZE_MULTIPLE)), pending))
                pending = pending[:0]
        if len(buckets) > 1 and len(buckets[-1].pair_indices) < self._n_rows_within_token_budget(self.seq_len) // 2:
            last, before = buckets.pop(), buckets.pop()
            buckets.append(
                LengthBucket(
                    last.row_length,
                    self._n_rows_within_token_budget(last.row_length),
                    np.concatenate([before.pair_indices, last.pair_indices]),
                )
            )
        return buckets

    @cached_property
    def n_batches(self) -> int:
        """Number of batches per epoch."""
        return sum(bucket.n_batches for bucket in self.buckets)

    def batch(self, t: int, *, rank: int = 0, world_size: int = 1) -> PairBatch:
        """Return the rows of batch t for this rank. The concatenated rows of all ranks are the full batch."""
        if t < 0:
            raise InputError(f"the batch number must not be negative, got {t}")
        epoch, slot = divmod(t, self.n_batches)
        batch_index = int(Permutation(self.n_batches, self.seed, epoch, 0)(np.array([slot]))[0])
        number, first = self._bucket_number_and_first_pair(batch_index)
        bucket = self.buckets[number]
        indices = np.arange(first, min(first + bucket.rows_per_batch, len(bucket.pair_indices)))
        pairs = bucket.pair_indices[Permutation(len(bucket.pair_indices), self.seed, epoch, 2 + number)(indices)]
        n_joined = self._sample_n_pairs_per_row(bucket, epoch, batch_index)
        rows = _reshape_and_pad_pair_indices(pairs, n_rows=-(-bucket.rows_per_batch // n_joined), width=n_joined)
        low, high = rank_row_range(len(rows), rank=rank, world_size=world_size)
        return assemble_joined_pair_batch(
            self.store, rows[low:high], length=n_joined * bucket.row_length, n_rows_at_max_length=self.batch_size
        )

    def eval_batch(self, t: int) -> PairBatch:
        """Return validation batch t, without concatenated pairs or empty rows.

        The batches are in random order, so the first batches are a representative sample.
        """
        batch_index = int(Permutation(self.n_batches, 0)(np.array([t]))[0])
        number, first = self._bucket_number_and_first_pair(batch_index)
        bucket = self.buckets[number]
        pairs = bucket.pair_indices[first : first + bucket.rows_per_batch]
        return assemble_joined_pair_batch(
            self.store, pairs[:, None], length=bucket.row_length, n_rows_at_max_length=self.batch_size
        )

    def _bucket_number_and_first_pair(self, batch_index: int) -> tuple[int, int]:
        """Return the bucket number of a batch and the index of its first pair in the bucket."""
        for number, bucket in enumerate(self.buckets):
            if batch_index < bucket.n_batches:
                return number, batch_index * bucket.rows_per_batch
            batch_index -= bucket.n_batches
        raise AssertionError("the batch index exceeds the number of batches")

    def _sample_n_pairs_per_row(self, bucket: LengthBucket, epoch: int, batch_index: int) -> int:
        if keyed_integer(1 << 20, self.seed, epoch, 1, batch_index, 0) >= self.join_fraction * (1 << 20):
            return 1
        n_pairs = 2 + keyed_integer(2, self.seed, epoch, 1, batch_index, 1)
        return max(1, min(n_pairs, self.seq_len // bucket.row_length))

    def _n_rows_within_token_budget(self, length: int) -> int:
        rows = max(1, self.batch_size * self.seq_len // length)
        # 24 is divisible by 2 and 3, so the pairs fill all rows if two or three pairs are concatenated.
        step = 24 if rows >= 24 else _SIZE_MULTIPLE if rows >= _SIZE_MULTIPLE else 1
        return rows // step * step


def assemble_joined_pair_batch(
    store: PairStore, pairs_by_row: Indices, *, length: int, n_rows_at_max_length: int
) -> PairBatch:
    """Build a batch from pair indices of shape (row, pair), concatenating the pairs in each row.

    An index of −1 means no pair. A row without pairs has no targets.
    """
    sources, n_source = _join_sentences_into_rows(store, 0, pairs_by_row, width=length)
    outputs, n_target = _join_sentences_into_rows(store, 1, pairs_by_row, width=length + 1)
    targets = outputs[:, 1:].copy()
    counts = np.where((pairs_by_row == _NO_PAIR).all(1), 0, n_target - 1)
    targets[np.arange(length) >= counts[:, None]] = IGNORE_INDEX
    ids = outputs[:, :-1].copy()
    return PairBatch(
        source=torch.from_numpy(sources),
        source_lengths=torch.from_numpy(n_source),
        ids=torch.from_numpy(ids),
        targets=torch.from_numpy(targets),
        counts=torch.from_numpy(counts),
        n_rows_at_max_length=n_rows_at_max_length,
    )


def _join_sentences_into_rows(
    store: PairStore, side: int, pairs_by_row: Indices, *, width: int
) -> tuple[Indices, Indices]:
    """Build rows of <bos>, sentences, <eos> and padding, and return them with the number of tokens in each row."""
    tokenizer, tokens = store.tokenizers[side], (store.source, store.target)[side]
    lengths = np.where(pairs_by_row == _NO_PAIR, 0, store.lengths[side][pairs_by_row])
    ends = 1 + np.cumsum(lengths, axis=1)
    rows = np.full((len(pairs_by_row), width), tokenizer.special_id(SpecialToken.PAD), np.int64)
    rows[:, 0] = tokenizer.special_id(SpecialToken.BOS)
    rows[np.arange(len(rows)), ends[:, -1]] = tokenizer.special_id(SpecialToken.EOS)
    destinations = expand_ranges(((ends - lengths) + np.arange(len(rows))[:, None] * width).ravel(), lengths.ravel())
    rows.ravel()[destinations] = tokens.take(expand_ranges(store.starts[side][pairs_by_row].ravel(), lengths.ravel()))
    return rows, ends[:, -1] + 1


def _reshape_and_pad_pair_indices(pairs: Indices, *, n_rows: int, width: int) -> Indices:
    """Arrange pair indices in rows of `width` pairs, padded with −1 so that all batches have the same shape."""
    filled = np.full(n_rows * width, _NO_PAIR)
    filled[: len(pairs)] = pairs
    return filled.reshape(n_rows, width)


def _bucket_max_lengths(length: int) -> Iterator[int]:
    """Yield the maximum lengths of the buckets.

    Buckets of short pairs are narrower because short pairs are more frequent.
    """
    edge = _SIZE_MULTIPLE
    while edge < length:
        yield edge
        edge += _SIZE_MULTIPLE * max(1, edge // 32)
    yield length


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step
