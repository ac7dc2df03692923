"""Which words stand in BERT's examples: A, and a B that goes on after it or is from another document.

An example is a stretch of one document around a place that an epoch visits once; it is parted into A and B between
two of its sentences. Of every two examples one gets a B from another document instead, cut in the same way, so that
neither length nor cut tells which it is. All is a function of (seed, example); nothing is stored or shuffled.
"""

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from qkv.data.keyed_random import Indices, Permutation, keyed_integer, keyed_uint64, keyed_uniform
from qkv.data.sentence_store import SentenceStore
from qkv.errors import InputError

MAX_RESAMPLES = 16
"""Draws from other documents before it is said that all of them go on alike."""
MIN_SHORT_FRACTION = 1 / 8
"""Of the room there is: the least that a short example may have."""


class _PairStream(IntEnum):
    """What a number is drawn for: each has a stream of its own. `masking` has those from 10 on."""

    ORDER = 0
    OFFSET = 1
    SHAPE = 2
    RANDOM_NEXT = 3
    OTHER_DOCUMENT = 4


@dataclass(frozen=True)
class SegmentPairs:
    """Where A and B begin in the store, and their words; without next sentences, B has none."""

    a: Indices
    n_a: Indices
    b: Indices
    n_b: Indices
    is_random_next: NDArray[np.bool_]
    """B is from another document."""


@dataclass(frozen=True)
class _Spans:
    """Words [a, stop), to be parted at b, of a document [begin, end); `max_tokens` is how many words there may be."""

    max_tokens: Indices
    begin: Indices
    end: Indices
    a: Indices
    b: Indices
    stop: Indices


@dataclass(frozen=True, kw_only=True)
class SegmentPairSampler:
    source: SentenceStore
    max_text_tokens: int
    """Of A and B together: at least 2."""
    seed: int
    pairs: bool = True
    """False: A alone, as long as both."""
    short_sequence_fraction: float = 0.1

    def __post_init__(self) -> None:
        if not self.pairs:
            return
        n_documents = int((self._document_lengths > 0).sum())
        if n_documents < 2:
            raise InputError(
                f"wrong next sentences are drawn from another document, and there is {n_documents}: give several "
                "files, part documents by a line <|endoftext|>, or leave them out: --no-next-sentence, in a recipe "
                "masking.next_sentence=false"
            )
        if self._document_lengths.max() < 2:
            raise InputError("next sentences: no document has two words, so none can be parted")

    @property
    def n_examples(self) -> int:
        """In an epoch."""
        return -(-self.source.n_text_tokens // self.max_text_tokens)

    def __call__(self, examples: Indices) -> SegmentPairs:
        spans = self._sample_spans(examples)
        n_a = (spans.b if self.pairs else spans.stop) - spans.a
        b, n_b = spans.b.copy(), spans.stop - spans.a - n_a
        # Of 2k and 2k + 1 one is wrong: exactly half of all.
        coin = keyed_uint64(examples // 2, self.seed, _PairStream.RANDOM_NEXT).astype(np.int64)
        is_random_next = ((examples + coin) % 2 == 1) & self.pairs
        rows = np.flatnonzero(is_random_next)
        for attempt in range(MAX_RESAMPLES + 1):
            if not len(rows):
                return SegmentPairs(spans.a, n_a, b, n_b, is_random_next)
            if attempt == MAX_RESAMPLES:
                break
            uniform = keyed_uniform(examples[rows] * MAX_RESAMPLES + attempt, self.seed, _PairStream.OTHER_DOCUMENT)
            b[rows], n_b[rows] = self._sample_from_other_document(spans, rows, uniform)
            rows = rows[self._equals_true_continuation(spans, rows, b[rows], n_b[rows])]
        raise InputError(
            f"{MAX_RESAMPLES} draws from other documents all gave the very sentence that follows: the documents are alike"
        )

    @cached_property
    def _document_lengths(self) -> Indices:
        """Words of each document."""
        documents = self.source.document_range
        starts, stops = self.source.document_span(np.arange(documents.start, documents.stop))
        return stops - starts

    @cached_property
    def _next_splittable_document(self) -> Indices | None:
        """For each document the next one that can be parted, itself if it can; None: all can."""
        is_splittable = self._document_lengths >= (2 if self.pairs else 1)
        if is_splittable.all():
            return None
        usable = np.flatnonzero(is_splittable)
        return (
            usable[np.searchsorted(usable, np.arange(len(is_splittable))) % len(usable)]
            + self.source.document_range.start
        )

    def _sample_spans(self, examples: Indices) -> _Spans:
        shortness, length_fraction, split_fraction = keyed_uniform(
            examples * 3 + np.arange(3)[:, None], self.seed, _PairStream.SHAPE
        )
        min_tokens = max(2, int(MIN_SHORT_FRACTION * self.max_text_tokens))
        shorter = min_tokens + (length_fraction * (self.max_text_tokens + 1 - min_tokens)).astype(np.int64)
        max_tokens = np.where(shortness < self.short_sequence_fraction, shorter, self.max_text_tokens)
        centers = self._epoch_centers(examples)
        documents = self.source.document_at(centers)
        if self._next_splittable_document is not None:
            documents = self._next_splittable_document[documents - self.source.document_range.start]
        begin, end = self.source.document_span(documents)
        # Around the centre, but within the document: its ends are seen nearly as often as its middle.
        earliest = _span_starts(np.clip(centers, begin, end), max_tokens, begin, end)
        at_border = self.source.boundaries[self.source.next_boundary(earliest)]
        a = np.where(at_border - earliest <= max_tokens // 2 - 1, at_border, earliest)
        stop = np.minimum(a + max_tokens, end)
        first, last = self.source.next_boundary(a + 1), self.source.next_boundary(stop)
        chosen = first + (split_fraction * (last - first)).astype(np.int64)
        # One long sentence is parted in its middle.
        b = np.where(last > first, self.source.boundaries[chosen], (a + stop) // 2)
        return _Spans(max_tokens, begin, end, a, b, stop)

    def _epoch_centers(self, examples: Indices) -> Indices:
        """An epoch visits places `max_text_tokens` apart, from a random one on, in a keyed order."""
        centers = np.empty_like(examples)
        epochs, numbers = np.divmod(examples, self.n_examples)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            ordered = Permutation(self.n_examples, self.seed, int(epoch), _PairStream.ORDER)(numbers[in_epoch])
            offset = keyed_integer(self.source.n_text_tokens, self.seed, int(epoch), _PairStream.OFFSET)
            centers[in_epoch] = (offset + ordered * self.max_text_tokens) % self.source.n_text_tokens
        return centers + self.source.start

    def _sample_from_other_document(
        self, spans: _Spans, rows: Indices, uniform: NDArray[np.float64]
    ) -> tuple[Indices, Indices]:
        """Some other document's B for these rows: where it begins, and its words."""
        begin, max_tokens = spans.begin[rows], spans.max_tokens[rows]
        n_a, document_length = spans.b[rows] - spans.a[rows], spans.end[rows] - begin
        positions = self.source.start + (uniform * (self.source.n_text_tokens - document_length)).astype(np.int64)
        positions += np.where(positions >= begin, document_length, 0)
        first, end = self.source.document_span(self.source.document_at(positions))
        # As if a stretch of that document had an A just as long.
        earliest = _span_starts(positions, max_tokens, first, end) + n_a
        boundaries, last = self.source.boundaries, self.source.sentence_at(end - 1)
        starts = boundaries[np.minimum(self.source.next_boundary(np.minimum(earliest, end)), last)]
        return starts, np.minimum(end - starts, max_tokens - n_a)

    def _equals_true_continuation(self, spans: _Spans, rows: Indices, b: Indices, n_b: Indices) -> NDArray[np.bool_]:
        """Whether B's first sentence is word for word what really follows, as in a document that is there twice."""
        true_starts = spans.b[rows]
        n = np.minimum(
            self._tokens_left_in_sentence(true_starts, spans.stop[rows] - true_starts),
            self._tokens_left_in_sentence(b, n_b),
        )
        is_equal = self.source.read_spans(b, np.ones_like(b)) == self.source.read_spans(true_starts, np.ones_like(b))
        candidates = np.flatnonzero(is_equal)
        if len(candidates):
            equal = self.source.read_spans(b[candidates], n[candidates]) == self.source.read_spans(
                true_starts[candidates], n[candidates]
            )
            is_equal[candidates] = np.logical_and.reduceat(equal, np.cumsum(n[candidates]) - n[candidates])
        return is_equal

    def _tokens_left_in_sentence(self, positions: Indices, n_text_tokens: Indices) -> Indices:
        return np.minimum(n_text_tokens, self.source.boundaries[self.source.sentence_at(positions) + 1] - positions)


def _span_starts(centers: Indices, max_tokens: Indices, begin: Indices, end: Indices) -> Indices:
    """Where a stretch of `max_tokens` words around each centre begins, moved so that the document fills it."""
    return np.clip(centers - max_tokens // 2, begin, np.maximum(begin, end - max_tokens))
