"""Build BERT's pre-training batches, whose rows are [CLS] A [SEP] B [SEP] with masked tokens.

Batch t is a pure function of (seed, t).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from qkv.choices import SpecialToken
from qkv.config.recipe import MaskingConfig
from qkv.data.keyed_random import Indices, rank_row_range
from qkv.data.masking import TokenMasker
from qkv.data.next_sentence import SegmentPairSampler, SegmentPairSpans
from qkv.data.sentence_store import SentenceStore, expand_ranges
from qkv.errors import ConfigError, InputError
from qkv.tensors import IGNORE_INDEX, AttentionMask, Ids
from qkv.text import Tokenizer


@dataclass(frozen=True)
class MaskedBatch:
    """A batch for masked language modeling and next-sentence prediction."""

    ids: Ids
    segments: Ids
    """Segment ids: 0 for [CLS] A [SEP], 1 for B [SEP]."""
    attention_mask: AttentionMask
    masked_positions: Int[Tensor, "batch slot"]
    """Positions of the masked tokens. All rows have the same number of slots so that shapes are constant."""
    targets: Int[Tensor, "batch slot"]
    """Original tokens at the masked positions, or IGNORE_INDEX in unused slots."""
    next_sentence_labels: Int[Tensor, "batch"] | None
    """Labels that are 1 if B is from another document and 0 if B follows A.

    None if next-sentence prediction is disabled.
    """
    n_targets: int
    full_batch_targets_per_row: float
    """Mean number of targets per row in the full batch, which `split` does not change.

    This number determines the weight of the next-sentence loss relative to the masked-token loss.
    """

    @property
    def n_tokens(self) -> int:
        return self.ids.numel()

    def split(self, n_rows: int) -> "Iterator[MaskedBatch]":
        """Split the batch into micro-batches of `n_rows` rows."""
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
    """An endless sequence of masked batches. Spans, segment pairs and masked tokens differ between epochs."""

    source: SentenceStore
    tokenizer: Tokenizer
    config: MaskingConfig
    seq_len: int
    """Number of tokens per row, including special tokens and padding."""
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        min_length = self.config.n_special_tokens + 2
        if self.seq_len < min_length:
            raise ConfigError(
                f"seq_len must be at least {min_length} (the special tokens and two text tokens), got {self.seq_len}"
            )
        _ = self.pair_sampler, self._masker  # create both now to report invalid settings immediately

    @cached_property
    def pair_sampler(self) -> SegmentPairSampler:
        """Sampler that selects the text spans for each example."""
        return SegmentPairSampler(
            source=self.source,
            max_text_tokens=self.seq_len - self.config.n_special_tokens,
            seed=self.seed,
            sample_pairs=self.config.next_sentence,
            short_sequence_fraction=self.config.short_sequence_fraction,
        )

    @cached_property
    def _masker(self) -> TokenMasker:
        return TokenMasker(self.tokenizer, self.config, seq_len=self.seq_len)

    def epoch(self, t: int) -> float:
        """Return the (fractional) number of epochs completed before batch t."""
        return t * self.batch_size / self.pair_sampler.n_examples

    def rank_example_numbers(self, t: int, *, rank: int = 0, world_size: int = 1) -> Indices:
        """Return the numbers of the examples in batch t that belong to this rank."""
        if t < 0:
            raise InputError(f"the batch number must not be negative, got {t}")
        first, last = rank_row_range(self.batch_size, rank=rank, world_size=world_size)
        return np.arange(first, last, dtype=np.int64) + t * self.batch_size

    def batch(self, t: int, *, rank: int = 0, world_size: int = 1) -> MaskedBatch:
        """Return this rank's rows of batch t. Concatenating the rows of all ranks gives the full batch."""
        examples = self.rank_example_numbers(t, rank=rank, world_size=world_size)
        pairs = self.pair_sampler(examples)
        lengths = pairs.a_lengths + pairs.b_lengths + self.config.n_special_tokens
        positions = np.arange(self.seq_len)
        attention_mask = positions < lengths[:, None]
        masked = self._masker(self._build_padded_cls_sep_rows(pairs), examples, seed=self.seed)
        n_targets = int((masked.targets != IGNORE_INDEX).sum())
        next_sentence_labels = (
            torch.from_numpy(pairs.is_random_next.astype(np.int64)) if self.config.next_sentence else None
        )
        return MaskedBatch(
            ids=torch.from_numpy(masked.ids),
            segments=torch.from_numpy((attention_mask & (positions > 1 + pairs.a_lengths[:, None])).astype(np.int64)),
            attention_mask=torch.from_numpy(attention_mask),
            masked_positions=torch.from_numpy(masked.masked_positions),
            targets=torch.from_numpy(masked.targets),
            next_sentence_labels=next_sentence_labels,
            n_targets=n_targets,
            full_batch_targets_per_row=n_targets / max(1, len(examples)),
        )

    def _build_padded_cls_sep_rows(self, pairs: SegmentPairSpans) -> Indices:
        pad_id, cls_id, sep_id = map(self.tokenizer.special_id, (SpecialToken.PAD, SpecialToken.CLS, SpecialToken.SEP))
        rows = np.arange(len(pairs.a_starts)) * self.seq_len
        ids = np.full(len(rows) * self.seq_len, pad_id)
        after_a = rows + 1 + pairs.a_lengths
        ids[rows], ids[after_a] = cls_id, sep_id
        segments = [(rows + 1, pairs.a_starts, pairs.a_lengths)]
        if self.config.next_sentence:
            ids[after_a + 1 + pairs.b_lengths] = sep_id
            segments.append((after_a + 1, pairs.b_starts, pairs.b_lengths))
        for destinations, starts, lengths in segments:
            ids[expand_ranges(destinations, lengths)] = self.source.read_spans_without_separators(starts, lengths)
        return ids.reshape(len(rows), self.seq_len)
