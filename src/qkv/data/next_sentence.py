"""Sample segment pairs for BERT's next-sentence prediction.

An example is a span of a document, split into segments A and B between two sentences. In half of the examples, B is
replaced with a segment from another document. That segment is chosen in the same way, so neither its length nor its
boundaries reveal the label. Each epoch visits evenly spaced span centers in random order. The result is a pure function
of (seed, example), and nothing is stored.
"""

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from qkv.data.sampler import Indices, Permutation, keyed_integer, keyed_uint64, keyed_uniform
from qkv.data.sentence_store import SentenceStore
from qkv.errors import InputError

MAX_RESAMPLES = 16
"""Maximum number of attempts to find a segment B that differs from the true continuation."""
MIN_SHORT_FRACTION = 1 / 8
"""Minimum length of short examples, as a fraction of the maximum length."""


class _RandomStreamKey(IntEnum):
    """Keys for the random streams. The module `masking` uses keys from 10."""

    ORDER = 0
    OFFSET = 1
    SHAPE = 2
    RANDOM_NEXT = 3
    OTHER_DOCUMENT = 4


@dataclass(frozen=True)
class SegmentPairSpans:
    """Start positions and lengths of segments A and B in the store.

    If next-sentence prediction is disabled, B is empty.
    """

    a_starts: Indices
    a_lengths: Indices
    b_starts: Indices
    b_lengths: Indices
    is_random_next: NDArray[np.bool_]
    """Whether each segment B is from another document."""


@dataclass(frozen=True)
class _SplitSpans:
    """Spans [start, stop) of at most `max_tokens` tokens, each split into two segments at `split`."""

    max_tokens: Indices
    document_start: Indices
    document_end: Indices
    start: Indices
    split: Indices
    stop: Indices


@dataclass(frozen=True, kw_only=True)
class SegmentPairSampler:
    """Sampler for segments A and B of each example."""

    source: SentenceStore
    max_text_tokens: int
    """Maximum total number of tokens in A and B, which must be at least 2."""
    seed: int
    sample_pairs: bool = True
    """Whether to sample pairs. If False, segment A is the entire span."""
    short_sequence_fraction: float = 0.1
    """Fraction of examples that have a shorter, random length."""

    def __post_init__(self) -> None:
        if not self.sample_pairs:
            return
        n_documents = int((self._document_lengths > 0).sum())
        if n_documents < 2:
            raise InputError(
                f"next-sentence prediction requires at least 2 documents, got {n_documents}; use several files, "
                "separate documents with <|endoftext|> lines, or disable next-sentence prediction "
                "(--no-next-sentence, or masking.next_sentence=false in a recipe)"
            )
        if self._document_lengths.max() < 2:
            raise InputError("next-sentence prediction requires at least one document of at least 2 tokens")

    @property
    def n_examples(self) -> int:
        """Number of examples per epoch."""
        return -(-self.source.n_text_tokens // self.max_text_tokens)

    def __call__(self, examples: Indices) -> SegmentPairSpans:
        spans = self._sample_split_spans(examples)
        n_a = (spans.split if self.sample_pairs else spans.stop) - spans.start
        b, n_b = spans.split.copy(), spans.stop - spans.start - n_a
        # Exactly one of the examples 2k and 2k + 1 has a random next sentence.
        coin = keyed_uint64(examples // 2, self.seed, _RandomStreamKey.RANDOM_NEXT).astype(np.int64)
        is_random_next = ((examples + coin) % 2 == 1) & self.sample_pairs
        rows = np.flatnonzero(is_random_next)
        for attempt in range(MAX_RESAMPLES + 1):
            if not len(rows):
                return SegmentPairSpans(spans.start, n_a, b, n_b, is_random_next)
            if attempt == MAX_RESAMPLES:
                break
            uniform = keyed_uniform(
                examples[rows] * MAX_RESAMPLES + attempt, self.seed, _RandomStreamKey.OTHER_DOCUMENT
            )
            b[rows], n_b[rows] = self._sample_b_from_other_document(spans, rows, uniform)
            rows = rows[self._first_sentence_equals_continuation(spans, rows, b[rows], n_b[rows])]
        raise InputError(
            f"the documents are too similar: in {MAX_RESAMPLES} attempts, every sentence sampled from another document "
            "was equal to the actual next sentence"
        )

    @cached_property
    def _document_lengths(self) -> Indices:
        """Number of tokens in each document."""
        documents = self.source.document_range
        starts, stops = self.source.clipped_document_spans(np.arange(documents.start, documents.stop))
        return stops - starts

    @cached_property
    def _splittable_document_at_or_after(self) -> Indices | None:
        """For each document, the index of the next document (or itself) that is long enough to split.

        None if all documents can be split.
        """
        is_splittable = self._document_lengths >= (2 if self.sample_pairs else 1)
        if is_splittable.all():
            return None
        usable = np.flatnonzero(is_splittable)
        return (
            usable[np.searchsorted(usable, np.arange(len(is_splittable))) % len(usable)]
            + self.source.document_range.start
        )

    def _sample_split_spans(self, examples: Indices) -> _SplitSpans:
        shortness, length_fraction, split_fraction = keyed_uniform(
            examples * 3 + np.arange(3)[:, None], self.seed, _RandomStreamKey.SHAPE
        )
        min_tokens = max(2, int(MIN_SHORT_FRACTION * self.max_text_tokens))
        shorter = min_tokens + (length_fraction * (self.max_text_tokens + 1 - min_tokens)).astype(np.int64)
        max_tokens = np.where(shortness < self.short_sequence_fraction, shorter, self.max_text_tokens)
        centers = self._evenly_spaced_shuffled_centers(examples)
        documents = self.source.document_at(centers)
        if self._splittable_document_at_or_after is not None:
            documents = self._splittable_document_at_or_after[documents - self.source.document_range.start]
        begin, end = self.source.clipped_document_spans(documents)
        # Spans are shifted to lie within the document, so the ends of a document are sampled nearly as often as its
        # middle.
        earliest = _span_starts(np.clip(centers, begin, end), max_tokens, begin, end)
        next_sentence = self.source.boundaries[self.source.next_boundary(earliest)]
        # Start at the beginning of a sentence if that shortens the span by less than half.
        a = np.where(next_sentence - earliest <= max_tokens // 2 - 1, next_sentence, earliest)
        stop = np.minimum(a + max_tokens, end)
        first, last = self.source.next_boundary(a + 1), self.source.next_boundary(stop)
        chosen = first + (split_fraction * (last - first)).astype(np.int64)
        # A span within a single sentence is split in the middle.
        b = np.where(last > first, self.source.boundaries[chosen], (a + stop) // 2)
        return _SplitSpans(max_tokens, begin, end, a, b, stop)

    def _evenly_spaced_shuffled_centers(self, examples: Indices) -> Indices:
        """Return the span centers, which are `max_text_tokens` apart with a random offset and in random order."""
        centers = np.empty_like(examples)
        epochs, numbers = np.divmod(examples, self.n_examples)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            ordered = Permutation(self.n_examples, self.seed, int(epoch), _RandomStreamKey.ORDER)(numbers[in_epoch])
            offset = keyed_integer(self.source.n_text_tokens, self.seed, int(epoch), _RandomStreamKey.OFFSET)
            centers[in_epoch] = (offset + ordered * self.max_text_tokens) % self.source.n_text_tokens
        return centers + self.source.start

    def _sample_b_from_other_document(
        self, spans: _SplitSpans, rows: Indices, uniform: NDArray[np.float64]
    ) -> tuple[Indices, Indices]:
        """Sample a segment B from another document for each row and return the start positions and lengths."""
        begin, max_tokens = spans.document_start[rows], spans.max_tokens[rows]
        n_a, document_length = spans.split[rows] - spans.start[rows], spans.document_end[rows] - begin
        positions = self.source.start + (uniform * (self.source.n_text_tokens - document_length)).astype(np.int64)
        positions += np.where(positions >= begin, document_length, 0)
        first, end = self.source.clipped_document_spans(self.source.document_at(positions))
        # B starts where it would follow a segment A of the same length in that document.
        earliest = _span_starts(positions, max_tokens, first, end) + n_a
        boundaries, last = self.source.boundaries, self.source.sentence_at(end - 1)
        starts = boundaries[np.minimum(self.source.next_boundary(np.minimum(earliest, end)), last)]
        return starts, np.minimum(end - starts, max_tokens - n_a)

    def _first_sentence_equals_continuation(
        self, spans: _SplitSpans, rows: Indices, b: Indices, n_b: Indices
    ) -> NDArray[np.bool_]:
        """Return whether each segment B starts with the sentence that truly follows A, as in duplicate documents."""
        true_starts = spans.split[rows]
        n = np.minimum(
            self._tokens_left_in_sentence(true_starts, spans.stop[rows] - true_starts),
            self._tokens_left_in_sentence(b, n_b),
        )
        is_equal = self.source.read_spans_without_separators(
            b, np.ones_like(b)
        ) == self.source.read_spans_without_separators(true_starts, np.ones_like(b))
        candidates = np.flatnonzero(is_equal)
        if len(candidates):
            equal = self.source.read_spans_without_separators(
                b[candidates], n[candidates]
            ) == self.source.read_spans_without_separators(true_starts[candidates], n[candidates])
            is_equal[candidates] = np.logical_and.reduceat(equal, np.cumsum(n[candidates]) - n[candidates])
        return is_equal

    def _tokens_left_in_sentence(self, positions: Indices, n_text_tokens: Indices) -> Indices:
        return np.minimum(n_text_tokens, self.source.boundaries[self.source.sentence_at(positions) + 1] - positions)


def _span_starts(centers: Indices, max_tokens: Indices, begin: Indices, end: Indices) -> Indices:
    """Return the start of a span of `max_tokens` tokens around each center, shifted to lie within its document."""
    return np.clip(centers - max_tokens // 2, begin, np.maximum(begin, end - max_tokens))
