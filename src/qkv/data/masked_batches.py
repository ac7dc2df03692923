"""Build BERT's pre-training batches, whose rows are [CLS] A [SEP] B [SEP] with masked tokens.

The tokens of a row are put in random order, and the first 15 % are masked. Starting at a random masked token (and
wrapping around), 80 % become [MASK], 10 % become a random token and the rest are unchanged. The fractions are exact in
every row up to rounding. The rounding is random, so the fractions are also exact on average. The result is a pure
function of (seed, example), and batch t is a pure function of (seed, t).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from qkv.choices import SpecialToken
from qkv.config.recipe import MaskingConfig
from qkv.data.next_sentence import SegmentPairSampler, SegmentPairSpans
from qkv.data.sampler import Indices, keyed_uint64, keyed_uniform, rank_row_range
from qkv.data.sentence_store import SentenceStore, expand_ranges
from qkv.errors import ConfigError, InputError
from qkv.tensors import IGNORE_INDEX, AttentionMask, Ids
from qkv.text import Tokenizer

_UNUSED = np.iinfo(np.int64).max
_UINT64_ONE = np.uint64(1)
_SPACE_SYMBOLS = ("Ġ", "▁")


class Replacement(IntEnum):
    """Kind of replacement for a masked token."""

    MASK = 0
    RANDOM = 1
    UNCHANGED = 2


class _MaskingRandomStreamKey(IntEnum):
    """Keys for the random streams. The module `next_sentence` uses keys from 0."""

    ORDER = 10
    ROUNDING = 11
    WORD = 12


@dataclass(frozen=True)
class MaskedRows:
    """Rows of token ids after masking, with the positions and original ids of the masked tokens."""

    ids: Indices
    masked_positions: Indices
    """Sorted positions of the masked tokens. All rows have the same number of slots, and unused slots contain 0."""
    targets: Indices
    """Original tokens at the masked positions, or IGNORE_INDEX in unused slots."""


class _ShuffledPositions(NamedTuple):
    positions: Indices
    n_maskable: Indices
    """Number of maskable tokens in each row. The positions of these tokens come first."""


class TokenMasker:
    """Masking of tokens in rows of up to `seq_len` tokens, including special tokens."""

    def __init__(self, tokenizer: Tokenizer, config: MaskingConfig, *, seq_len: int) -> None:
        self.config = config
        self.mask_id = tokenizer.special_id(SpecialToken.MASK)
        self.max_masked_tokens = config.max_masked_tokens(seq_len)
        self._is_special = np.zeros(tokenizer.vocab_size, bool)
        self._is_special[list(tokenizer.special_ids)] = True
        self._ordinary_ids = np.flatnonzero(~self._is_special)
        self._continues = _word_continuation_flags_by_id(tokenizer) if config.whole_word_masking else None

    def __call__(self, ids: Indices, examples: Indices, *, seed: int) -> MaskedRows:
        """Mask tokens in each row. The example numbers in `examples` determine the randomness of the rows."""
        order, n_maskable = self._shuffle_positions_maskable_first(ids, examples, seed)
        rounding, offset = keyed_uniform(examples * 2 + np.arange(2)[:, None], seed, _MaskingRandomStreamKey.ROUNDING)[
            ..., None
        ]
        n_masked = np.floor(self.config.masked_fraction * n_maskable + rounding).astype(np.int64)
        n_masked = np.minimum(np.clip(n_masked, 1, self.max_masked_tokens), n_maskable)
        if self._continues is None:
            order = order[:, : self.max_masked_tokens]
            is_masked = np.arange(self.max_masked_tokens) < n_masked
        else:
            is_masked = _select_whole_words_within_budget(
                np.take_along_axis(self._word_starts(ids), order, 1), n_masked, n_maskable
            )
        phase = ((np.cumsum(is_masked, 1) - 1) / np.maximum(is_masked.sum(1, keepdims=True), 1) + offset) % 1.0
        limits = (self.config.mask_token_fraction, self.config.mask_token_fraction + self.config.random_token_fraction)
        kinds = np.searchsorted(limits, phase, side="right")
        return self._replace_masked_tokens(
            ids, np.where(is_masked, order * len(Replacement) + kinds, _UNUSED), examples, seed
        )

    def _shuffle_positions_maskable_first(self, ids: Indices, examples: Indices, seed: int) -> _ShuffledPositions:
        """Return the positions in each row in random order, and the number of maskable tokens.

        Maskable tokens come before special tokens. For whole-word masking, the tokens of a word are adjacent.
        """
        length = ids.shape[1]
        keys = keyed_uint64(examples[:, None] * length + np.arange(length), seed, _MaskingRandomStreamKey.ORDER)
        if self._continues is not None:
            keys = np.take_along_axis(keys, self._word_starts(ids), 1)
        # The low bits of each key contain the position. Unlike an argsort, sorting unique keys is deterministic.
        n_bits = np.uint64((length - 1).bit_length())
        keys = ((keys >> n_bits >> _UINT64_ONE) << n_bits) | np.arange(length, dtype=np.uint64)
        is_special = self._is_special[ids]
        keys[is_special] |= _UINT64_ONE << np.uint64(63)
        keys.sort(axis=1)
        positions = (keys & ((_UINT64_ONE << n_bits) - _UINT64_ONE)).astype(np.int64)
        return _ShuffledPositions(positions, n_maskable=length - is_special.sum(1, keepdims=True))

    def _word_starts(self, ids: Indices) -> Indices:
        """Return, for each position, the position at which its word starts."""
        assert self._continues is not None
        return np.maximum.accumulate(np.where(self._continues[ids], 0, np.arange(ids.shape[1])), axis=1)

    def _replace_masked_tokens(
        self, ids: Indices, packed_positions_and_kinds: Indices, examples: Indices, seed: int
    ) -> MaskedRows:
        """Replace the masked tokens and return the resulting rows.

        `packed_positions_and_kinds` combines the position and the kind of replacement in a single number, so one sort
        orders both.
        """
        packed_positions_and_kinds = np.sort(packed_positions_and_kinds, axis=1)[:, : self.max_masked_tokens]
        is_used = packed_positions_and_kinds != _UNUSED
        masked_positions, kinds = np.divmod(
            np.where(is_used, packed_positions_and_kinds, Replacement.UNCHANGED), len(Replacement)
        )
        original_ids = np.take_along_axis(ids, masked_positions, 1)
        slots = examples[:, None] * self.max_masked_tokens + np.arange(self.max_masked_tokens)
        random_indices = (keyed_uniform(slots, seed, _MaskingRandomStreamKey.WORD) * len(self._ordinary_ids)).astype(
            np.int64
        )
        replacements = np.where(kinds == Replacement.RANDOM, self._ordinary_ids[random_indices], original_ids)
        replacements[kinds == Replacement.MASK] = self.mask_id
        masked_ids = ids.copy()
        np.put_along_axis(masked_ids, masked_positions, replacements, 1)
        return MaskedRows(masked_ids, masked_positions, np.where(is_used, original_ids, IGNORE_INDEX))


def _select_whole_words_within_budget(
    shuffled_words: Indices, n_masked: Indices, n_maskable: Indices
) -> NDArray[np.bool_]:
    """Select which of the shuffled positions to mask without splitting a word.

    A word that would exceed the number of masked tokens is skipped in favor of later words that consist of a single
    token. `shuffled_words` identifies the word at each of the shuffled positions.
    """
    ranks = np.arange(shuffled_words.shape[1])
    at_limit = np.take_along_axis(shuffled_words, np.minimum(n_masked, shuffled_words.shape[1] - 1), 1)
    crosses_limit = (shuffled_words == at_limit) & (n_masked < n_maskable)
    is_masked = (ranks < n_masked) & ~crosses_limit
    is_single_token_word = (shuffled_words != np.roll(shuffled_words, 1, 1)) & (
        shuffled_words != np.roll(shuffled_words, -1, 1)
    )
    is_substitute = is_single_token_word & ~crosses_limit & (ranks >= n_masked) & (ranks < n_maskable)
    return is_masked | (is_substitute & (np.cumsum(is_substitute, 1) <= n_masked - is_masked.sum(1, keepdims=True)))


def _word_continuation_flags_by_id(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """Return an array that indicates which token ids continue a word.

    These are tokens that start with ## in WordPiece vocabularies, and tokens without a leading space in other
    vocabularies.
    """
    tokens = [tokenizer.id_to_token(token_id) for token_id in range(tokenizer.vocab_size)]
    if any(token.startswith("##") for token in tokens):
        return np.array([token.startswith("##") for token in tokens])
    if any(token.startswith(_SPACE_SYMBOLS) for token in tokens):
        return np.array(
            [
                token_id not in tokenizer.special_ids and not token.startswith(_SPACE_SYMBOLS)
                for token_id, token in enumerate(tokens)
            ]
        )
    raise InputError("whole_word_masking requires a tokenizer whose tokens mark the start or continuation of words")


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
