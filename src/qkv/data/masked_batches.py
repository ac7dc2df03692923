"""BERT's pre-training batches: [CLS] A [SEP] B [SEP] with words hidden; batch t is a pure function of (seed, t)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from qkv.choices import SpecialToken
from qkv.config.masking import MaskingConfig
from qkv.data.keyed_random import Indices, rank_row_range
from qkv.data.masking import TokenMasker
from qkv.data.next_sentence import SegmentPairs, SegmentPairSampler
from qkv.data.sentence_store import SentenceStore, expand_ranges
from qkv.errors import ConfigError, InputError
from qkv.tensors import IGNORE_INDEX, AttentionMask, Ids
from qkv.text import Tokenizer


@dataclass(frozen=True)
class MaskedBatch:
    ids: Ids
    segments: Ids
    """0 for [CLS] A [SEP], 1 for B [SEP]."""
    attention_mask: AttentionMask
    masked_positions: Int[Tensor, "batch slot"]
    """Where words are asked for: as many slots in each row, so that shapes stay the same."""
    targets: Int[Tensor, "batch slot"]
    """What stood there, or IGNORE_INDEX in a slot that is not used."""
    next_sentence_labels: Int[Tensor, "batch"] | None
    """1 where B is from another document (column 1 of the next-sentence head); None: there is no B."""
    n_targets: int
    targets_per_row: float
    """Of the whole batch, also in a part of it: how much a next sentence counts beside a masked word."""

    @property
    def n_tokens(self) -> int:
        return self.ids.numel()

    def split(self, n_rows: int) -> "Iterator[MaskedBatch]":
        """The batch in parts of n_rows rows."""
        for start in range(0, len(self.ids), n_rows):
            rows = slice(start, start + n_rows)
            tensors = {name: tensor[rows] for name, tensor in self._tensors().items()}
            yield replace(self, **tensors, n_targets=int((tensors["targets"] != IGNORE_INDEX).sum()))

    def to(self, device: torch.device | str) -> "MaskedBatch":
        return replace(self, **{name: t.to(device, non_blocking=True) for name, t in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


@dataclass(frozen=True, kw_only=True)
class MaskedBatches:
    """Endless: epoch follows epoch, each with other stretches, other pairs and other hidden words."""

    source: SentenceStore
    tokenizer: Tokenizer
    config: MaskingConfig
    length: int
    """Tokens of a row, special ones included."""
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        min_length = self.config.n_special_tokens + 2
        if self.length < min_length:
            raise ConfigError(f"length={self.length} must be {min_length} or more: [CLS], [SEP] and two words")
        _ = self.pair_sampler, self._masking  # what they refuse is said now

    @cached_property
    def pair_sampler(self) -> SegmentPairSampler:
        """Which words stand in which example."""
        return SegmentPairSampler(
            source=self.source,
            max_text_tokens=self.length - self.config.n_special_tokens,
            seed=self.seed,
            pairs=self.config.next_sentence,
            short_sequence_fraction=self.config.short_sequence_fraction,
        )

    @cached_property
    def _masking(self) -> TokenMasker:
        return TokenMasker(self.tokenizer, self.config, length=self.length)

    def epoch(self, t: int) -> float:
        """How many times the text has been seen when batch t begins."""
        return t * self.batch_size / self.pair_sampler.n_examples

    def example_indices(self, t: int, *, rank: int = 0, world_size: int = 1) -> Indices:
        """The numbers of batch t's examples."""
        if t < 0:
            raise InputError(f"batch {t}: batches are counted from 0")
        first, last = rank_row_range(self.batch_size, rank=rank, world_size=world_size)
        return np.arange(first, last, dtype=np.int64) + t * self.batch_size

    def batch(self, t: int, *, rank: int = 0, world_size: int = 1) -> MaskedBatch:
        """This rank's rows of batch t: the ranks' rows in order are the batch of one."""
        examples = self.example_indices(t, rank=rank, world_size=world_size)
        pairs = self.pair_sampler(examples)
        lengths = pairs.n_a + pairs.n_b + self.config.n_special_tokens
        masked_positions = np.arange(self.length)
        attention_mask = masked_positions < lengths[:, None]
        masked = self._masking(self._build_rows(pairs), examples, seed=self.seed)
        n_targets = int((masked.targets != IGNORE_INDEX).sum())
        next_sentence_labels = (
            torch.from_numpy(pairs.is_random_next.astype(np.int64)) if self.config.next_sentence else None
        )
        return MaskedBatch(
            ids=torch.from_numpy(masked.ids),
            segments=torch.from_numpy((attention_mask & (masked_positions > 1 + pairs.n_a[:, None])).astype(np.int64)),
            attention_mask=torch.from_numpy(attention_mask),
            masked_positions=torch.from_numpy(masked.masked_positions),
            targets=torch.from_numpy(masked.targets),
            next_sentence_labels=next_sentence_labels,
            n_targets=n_targets,
            targets_per_row=n_targets / max(1, len(examples)),
        )

    def _build_rows(self, pairs: SegmentPairs) -> Indices:
        pad_id, cls_id, sep_id = map(self.tokenizer.special_id, (SpecialToken.PAD, SpecialToken.CLS, SpecialToken.SEP))
        rows = np.arange(len(pairs.a)) * self.length
        ids = np.full(len(rows) * self.length, pad_id)
        after_a = rows + 1 + pairs.n_a
        ids[rows], ids[after_a] = cls_id, sep_id
        segments = [(rows + 1, pairs.a, pairs.n_a)]
        if self.config.next_sentence:
            ids[after_a + 1 + pairs.n_b] = sep_id
            segments.append((after_a + 1, pairs.b, pairs.n_b))
        for masked_positions, starts, lengths in segments:
            ids[expand_ranges(masked_positions, lengths)] = self.source.read_spans(starts, lengths)
        return ids.reshape(len(rows), self.length)
