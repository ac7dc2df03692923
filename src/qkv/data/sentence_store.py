"""Add sentence boundaries to a token store.

In addition to the files of the token store, sentences.bin contains the cumulative number of sentences at the end of
each document, the start position of each sentence, and the end position of the last one (int64, little endian).
Positions count only text tokens, not the separators that follow each sentence on disk. The position of a token on disk
is therefore its text position plus the number of its sentence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from qkv.data.documents import ProgressCallback
from qkv.data.file_io import write_atomically
from qkv.data.sampler import Indices
from qkv.data.token_store import INDEX_FILE, TokenStore
from qkv.data.token_store_writer import is_unfinished, prepare_store
from qkv.errors import InputError
from qkv.text import Tokenizer

SENTENCES_FILE = "sentences.bin"


@dataclass(frozen=True, kw_only=True)
class SentenceStore:
    """A contiguous range of sentences in a store. Positions and indices refer to the full store."""

    store: TokenStore
    boundaries: Indices
    """Positions of the sentence boundaries. Sentence s spans [boundaries[s], boundaries[s + 1])."""
    document_ends: Indices
    start: int
    """Position of the first token."""
    stop: int

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Open a store. Only the index and the document ends are read into memory. All other data is memory-mapped."""
        folder = Path(folder)
        store = TokenStore.open(folder)
        path = folder / SENTENCES_FILE
        if not path.is_file():
            raise InputError(f"{folder}: the store has no sentence boundaries ({SENTENCES_FILE} is missing)")
        table = np.asarray(np.memmap(path, dtype="<i8", mode="r"))
        n_sentences = len(table) - store.n_documents - 1
        counts, boundaries = table[: store.n_documents], table[store.n_documents :]
        if n_sentences < 1 or counts[-1] != n_sentences or boundaries[-1] + n_sentences != store.n_tokens:
            raise InputError(
                f"{path}: does not match the token store in the same folder, which contains {store.n_tokens} tokens"
            )
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

    def split(self, second_token_fraction: float) -> "tuple[SentenceStore, SentenceStore]":
        """Split the store into two parts, the second of which contains about the given fraction of the tokens.

        The store is split between documents if each part has at least two, and between sentences otherwise.
        """
        goal = np.array([round(self.stop - second_token_fraction * self.n_text_tokens)])
        first, n = self.document_range.start, len(self.document_range)
        if n >= 4:
            chosen = np.clip(self.document_at(goal) - 1, first + 1, first + n - 3)
            split_position = int(self.document_ends[chosen][0])
        else:
            split_position = int(self.boundaries[self.next_boundary(goal)][0])
        if not self.start < split_position < self.stop:
            raise InputError(
                f"cannot split off {second_token_fraction:.0%} of {self.n_text_tokens} tokens "
                "without splitting a sentence"
            )
        return replace(self, stop=split_position), replace(self, start=split_position)

    def document_at(self, positions: Indices) -> Indices:
        return np.searchsorted(self.document_ends, positions, side="right")

    def clipped_document_spans(self, documents: Indices) -> tuple[Indices, Indices]:
        """Return the start and end positions of documents, restricted to this part of the store."""
        # Index −1 (for document 0) reads the last entry, which is replaced with 0.
        begin = np.where(documents > 0, self.document_ends[documents - 1], 0)
        return np.maximum(begin, self.start), np.minimum(self.document_ends[documents], self.stop)

    def sentence_at(self, positions: Indices) -> Indices:
        return np.searchsorted(self.boundaries, positions, side="right") - 1

    def next_boundary(self, positions: Indices) -> Indices:
        """Return the index of the first sentence boundary at or after each position."""
        return np.searchsorted(self.boundaries, positions, side="left")

    def read_spans_without_separators(self, starts: Indices, lengths: Indices) -> Indices:
        """Return the concatenated tokens of the given spans, without separators. Spans must not be empty."""
        first = self.sentence_at(starts)
        n_on_disk = lengths + self.sentence_at(starts + lengths - 1) - first
        tokens = self.store.take(expand_ranges(starts + first, n_on_disk))
        return tokens[tokens != self.store.end_id]


def expand_ranges(starts: Indices, lengths: Indices) -> Indices:
    """Return the concatenation of range(start, start + length) for all starts and lengths."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum())


def prepare_sentence_store(
    paths: Sequence[str | Path],
    folder: Path,
    *,
    tokenizer: Tokenizer,
    field: str = "text",
    n_workers: int | None = None,
    progress: ProgressCallback | None = None,
) -> SentenceStore:
    """Tokenize files into a store with sentence boundaries. Interrupted calls can be resumed (see `prepare_store`)."""
    if is_unfinished(folder) or not (folder / INDEX_FILE).exists():
        prepare_store(
            paths, folder, tokenizer=tokenizer, field=field, n_workers=n_workers, sentences=True, progress=progress
        )
    if not (folder / SENTENCES_FILE).exists():
        write_atomically(
            folder / SENTENCES_FILE,
            np.concatenate(_find_sentence_boundaries(TokenStore.open(folder))).astype("<i8").tobytes(),
        )
    return SentenceStore.open(folder)


class _SentenceBoundaries(NamedTuple):
    cumulative_count_per_document: NDArray[np.int64]
    """Total number of sentences up to the end of each document."""
    boundaries: NDArray[np.int64]
    """Position 0, followed by the end position of each sentence. Positions do not count separators."""


def _find_sentence_boundaries(store: TokenStore, tokens_per_read: int = 1 << 24) -> _SentenceBoundaries:
    blocks = range(0, store.n_tokens, tokens_per_read)
    separator_blocks = [
        np.flatnonzero(store.read(start, min(start + tokens_per_read, store.n_tokens)) == store.end_id) + start
        for start in blocks
    ]
    separators = np.concatenate(separator_blocks)
    counts = np.searchsorted(separators, store.document_ends(), side="left")
    ends = separators - np.arange(len(separators))
    return _SentenceBoundaries(counts, np.concatenate([[0], ends]))
