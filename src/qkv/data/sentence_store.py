"""A token store whose documents are parted into sentences, and where each of them begins.

sentences.bin beside the store's own files: for each document the sentences up to its end, then for each sentence
where it begins, and where the last one ends; int64, little endian. Places count words alone, not the separators
that stand after every sentence on disk: sentence s's separator is the s-th, so a word's place on disk is its place
here plus the number of its sentence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from qkv.data.file_io import write_atomically
from qkv.data.keyed_random import Indices
from qkv.data.text_sources import ProgressCallback
from qkv.data.token_store import INDEX_FILE, TokenStore
from qkv.data.token_store_writer import is_unfinished, prepare_store
from qkv.errors import InputError
from qkv.text import Tokenizer

SENTENCES_FILE = "sentences.bin"


@dataclass(frozen=True, kw_only=True)
class SentenceStore:
    """All of a store's sentences, or some in a row; places and numbers are those of the whole store."""

    store: TokenStore
    boundaries: Indices
    """borders[s] is where sentence s begins, borders[s + 1] where it ends."""
    document_ends: Indices
    start: int
    """The place of the first word."""
    stop: int

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Reads the index and where documents end; everything else is mapped."""
        folder = Path(folder)
        store = TokenStore.open(folder)
        path = folder / SENTENCES_FILE
        if not path.is_file():
            raise InputError(f"{folder}: was not prepared by sentences ({SENTENCES_FILE} is missing)")
        table = np.asarray(np.memmap(path, dtype="<i8", mode="r"))
        n_sentences = len(table) - store.n_documents - 1
        counts, boundaries = table[: store.n_documents], table[store.n_documents :]
        if n_sentences < 1 or counts[-1] != n_sentences or boundaries[-1] + n_sentences != store.n_tokens:
            raise InputError(f"{path}: does not fit the store of {store.n_tokens} tokens beside it")
        return cls(
            store=store, boundaries=boundaries, document_ends=boundaries[counts], start=0, stop=int(boundaries[-1])
        )

    @property
    def n_text_tokens(self) -> int:
        return self.stop - self.start

    @property
    def document_range(self) -> range:
        first, last = self.document_at(np.array([self.start, self.stop - 1]))
        return range(int(first), int(last) + 1)

    def split(self, share: float) -> "tuple[SentenceStore, SentenceStore]":
        """Two parts; the second has the end, about this share of the words.

        Parted between documents where each part then has two or more, else between sentences.
        """
        goal = np.array([round(self.stop - share * self.n_text_tokens)])
        first, n = self.document_range.start, len(self.document_range)
        if n >= 4:
            chosen = np.clip(self.document_at(goal) - 1, first + 1, first + n - 3)
            split_position = int(self.document_ends[chosen][0])
        else:
            split_position = int(self.boundaries[self.next_boundary(goal)][0])
        if not self.start < split_position < self.stop:
            raise InputError(f"{self.n_text_tokens} words are too few sentences to keep {share:.0%} of them apart")
        return replace(self, stop=split_position), replace(self, start=split_position)

    def document_at(self, positions: Indices) -> Indices:
        return np.searchsorted(self.document_ends, positions, side="right")

    def document_span(self, documents: Indices) -> tuple[Indices, Indices]:
        """Where each begins and ends, as far as it is in this part."""
        # Document 0 looks at the last entry, and gets 0 instead.
        begin = np.where(documents > 0, self.document_ends[documents - 1], 0)
        return np.maximum(begin, self.start), np.minimum(self.document_ends[documents], self.stop)

    def sentence_at(self, positions: Indices) -> Indices:
        return np.searchsorted(self.boundaries, positions, side="right") - 1

    def next_boundary(self, positions: Indices) -> Indices:
        """The number of the first border at this place or after it."""
        return np.searchsorted(self.boundaries, positions, side="left")

    def read_spans(self, starts: Indices, lengths: Indices) -> Indices:
        """The words of many stretches, one after the other, each at least one word long."""
        first = self.sentence_at(starts)
        n_on_disk = lengths + self.sentence_at(starts + lengths - 1) - first
        tokens = self.store.take(expand_ranges(starts + first, n_on_disk))
        return tokens[tokens != self.store.end_id]


def expand_ranges(starts: Indices, lengths: Indices) -> Indices:
    """start, start + 1, … for each stretch, joined."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum())


def prepare_sentences(
    paths: Sequence[str | Path],
    folder: Path,
    *,
    tokenizer: Tokenizer,
    field: str = "text",
    n_workers: int | None = None,
    progress: ProgressCallback | None = None,
) -> SentenceStore:
    """As `prepare_store`; what a killed call finished is kept, the whole store included."""
    if is_unfinished(folder) or not (folder / INDEX_FILE).exists():
        prepare_store(
            paths, folder, tokenizer=tokenizer, field=field, n_workers=n_workers, sentences=True, progress=progress
        )
    if not (folder / SENTENCES_FILE).exists():
        write_atomically(
            folder / SENTENCES_FILE, _find_sentence_boundaries(TokenStore.open(folder)).astype("<i8").tobytes()
        )
    return SentenceStore.open(folder)


def _find_sentence_boundaries(store: TokenStore, block: int = 1 << 24) -> NDArray[np.int64]:
    blocks = range(0, store.n_tokens, block)
    separator_blocks = [
        np.flatnonzero(store.read(start, min(start + block, store.n_tokens)) == store.end_id) + start
        for start in blocks
    ]
    separators = np.concatenate(separator_blocks)
    counts = np.searchsorted(separators, store.document_ends(), side="left")
    ends = separators - np.arange(len(separators))
    return np.concatenate([counts, [0], ends])
