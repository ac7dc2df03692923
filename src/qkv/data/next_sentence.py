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

from qkv.data.order import Indices, Permutation, keyed_draws, keyed_fractions, keyed_integer
from qkv.data.sentence_store import SentenceStore
from qkv.errors import InputError

N_TRIES = 16
"""Draws from other documents before it is said that all of them go on alike."""
SHORTEST = 1 / 8
"""Of the room there is: the least that a short example may have."""


class _Draw(IntEnum):
    """What a number is drawn for: each has a stream of its own. `masking` has those from 10 on."""

    ORDER = 0
    OFFSET = 1
    SHAPE = 2
    WRONG = 3
    ELSEWHERE = 4


@dataclass(frozen=True)
class Pairs:
    """Where A and B begin in the store, and their words; without next sentences, B has none."""

    a: Indices
    n_a: Indices
    b: Indices
    n_b: Indices
    is_wrong: NDArray[np.bool_]
    """B is from another document."""


@dataclass(frozen=True)
class _Stretches:
    """Words [a, stop), to be parted at b, of a document [begin, end); `room` is how many words there may be."""

    room: Indices
    begin: Indices
    end: Indices
    a: Indices
    b: Indices
    stop: Indices


@dataclass(frozen=True, kw_only=True)
class NextSentence:
    source: SentenceStore
    max_words: int
    """Of A and B together: at least 2."""
    seed: int
    pairs: bool = True
    """False: A alone, as long as both."""
    short_share: float = 0.1

    def __post_init__(self) -> None:
        if not self.pairs:
            return
        n_documents = int((self._lengths > 0).sum())
        if n_documents < 2:
            raise InputError(
                f"wrong next sentences are drawn from another document, and there is {n_documents}: give several "
                "files, part documents by a line <|endoftext|>, or leave them out: --no-next-sentence, in a recipe "
                "examples.next_sentence=false"
            )
        if self._lengths.max() < 2:
            raise InputError("next sentences: no document has two words, so none can be parted")

    @property
    def n_examples(self) -> int:
        """In an epoch."""
        return -(-self.source.n_words // self.max_words)

    def __call__(self, examples: Indices) -> Pairs:
        found = self._stretches(examples)
        n_a = (found.b if self.pairs else found.stop) - found.a
        b, n_b = found.b.copy(), found.stop - found.a - n_a
        # Of 2k and 2k + 1 one is wrong: exactly half of all.
        coin = keyed_draws(examples // 2, self.seed, _Draw.WRONG).astype(np.int64)
        is_wrong = ((examples + coin) % 2 == 1) & self.pairs
        rows = np.flatnonzero(is_wrong)
        for attempt in range(N_TRIES + 1):
            if not len(rows):
                return Pairs(found.a, n_a, b, n_b, is_wrong)
            if attempt == N_TRIES:
                break
            chance = keyed_fractions(examples[rows] * N_TRIES + attempt, self.seed, _Draw.ELSEWHERE)
            b[rows], n_b[rows] = self._elsewhere(found, rows, chance)
            rows = rows[self._goes_on_alike(found, rows, b[rows], n_b[rows])]
        raise InputError(
            f"{N_TRIES} draws from other documents all gave the very sentence that follows: the documents are alike"
        )

    @cached_property
    def _lengths(self) -> Indices:
        """Words of each document."""
        documents = self.source.documents
        starts, stops = self.source.document_span(np.arange(documents.start, documents.stop))
        return stops - starts

    @cached_property
    def _long_enough(self) -> Indices | None:
        """For each document the next one that can be parted, itself if it can; None: all can."""
        can = self._lengths >= (2 if self.pairs else 1)
        if can.all():
            return None
        usable = np.flatnonzero(can)
        return usable[np.searchsorted(usable, np.arange(len(can))) % len(usable)] + self.source.documents.start

    def _stretches(self, examples: Indices) -> _Stretches:
        short, how_short, where = keyed_fractions(examples * 3 + np.arange(3)[:, None], self.seed, _Draw.SHAPE)
        least = max(2, int(SHORTEST * self.max_words))
        shorter = least + (how_short * (self.max_words + 1 - least)).astype(np.int64)
        room = np.where(short < self.short_share, shorter, self.max_words)
        centres = self._centres(examples)
        documents = self.source.document_at(centres)
        if self._long_enough is not None:
            documents = self._long_enough[documents - self.source.documents.start]
        begin, end = self.source.document_span(documents)
        # Around the centre, but within the document: its ends are seen nearly as often as its middle.
        earliest = _around(np.clip(centres, begin, end), room, begin, end)
        at_border = self.source.borders[self.source.border_from(earliest)]
        a = np.where(at_border - earliest <= room // 2 - 1, at_border, earliest)
        stop = np.minimum(a + room, end)
        first, last = self.source.border_from(a + 1), self.source.border_from(stop)
        chosen = first + (where * (last - first)).astype(np.int64)
        # One long sentence is parted in its middle.
        b = np.where(last > first, self.source.borders[chosen], (a + stop) // 2)
        return _Stretches(room, begin, end, a, b, stop)

    def _centres(self, examples: Indices) -> Indices:
        """An epoch visits places `max_words` apart, from a random one on, in a keyed order."""
        centres = np.empty_like(examples)
        epochs, numbers = np.divmod(examples, self.n_examples)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            ordered = Permutation(self.n_examples, self.seed, int(epoch), _Draw.ORDER)(numbers[here])
            offset = keyed_integer(self.source.n_words, self.seed, int(epoch), _Draw.OFFSET)
            centres[here] = (offset + ordered * self.max_words) % self.source.n_words
        return centres + self.source.start

    def _elsewhere(self, found: _Stretches, rows: Indices, chance: NDArray[np.float64]) -> tuple[Indices, Indices]:
        """Some other document's B for these rows: where it begins, and its words."""
        begin, room = found.begin[rows], found.room[rows]
        n_a, n_own = found.b[rows] - found.a[rows], found.end[rows] - begin
        places = self.source.start + (chance * (self.source.n_words - n_own)).astype(np.int64)
        places += np.where(places >= begin, n_own, 0)
        first, end = self.source.document_span(self.source.document_at(places))
        # As if a stretch of that document had an A just as long.
        earliest = _around(places, room, first, end) + n_a
        borders, last = self.source.borders, self.source.sentence_at(end - 1)
        starts = borders[np.minimum(self.source.border_from(np.minimum(earliest, end)), last)]
        return starts, np.minimum(end - starts, room - n_a)

    def _goes_on_alike(self, found: _Stretches, rows: Indices, b: Indices, n_b: Indices) -> NDArray[np.bool_]:
        """Whether B's first sentence is word for word what really follows, as in a document that is there twice."""
        real = found.b[rows]
        n = np.minimum(self._sentence_left(real, found.stop[rows] - real), self._sentence_left(b, n_b))
        same = self.source.words(b, np.ones_like(b)) == self.source.words(real, np.ones_like(b))
        maybe = np.flatnonzero(same)
        if len(maybe):
            equal = self.source.words(b[maybe], n[maybe]) == self.source.words(real[maybe], n[maybe])
            same[maybe] = np.logical_and.reduceat(equal, np.cumsum(n[maybe]) - n[maybe])
        return same

    def _sentence_left(self, places: Indices, n_words: Indices) -> Indices:
        return np.minimum(n_words, self.source.borders[self.source.sentence_at(places) + 1] - places)


def _around(centres: Indices, room: Indices, begin: Indices, end: Indices) -> Indices:
    """Where a stretch of `room` words around each centre begins, moved so that the document fills it."""
    return np.clip(centres - room // 2, begin, np.maximum(begin, end - room))
