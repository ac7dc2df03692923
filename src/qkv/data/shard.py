"""One shard of a token store while it is written: aside, hashed on the way, renamed when it is whole."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qkv.data.disk import aside_of, sync_folder, write_whole, writing
from qkv.data.documents import Part
from qkv.data.store import ShardRecord, documents_file, tokens_file
from qkv.text import Tokenizer


@dataclass(frozen=True)
class Encoded:
    """Some parts of documents as ids, end tokens in their places."""

    tokens: NDArray[np.uint16] | NDArray[np.uint32]
    lengths: list[int]
    """Tokens of each part, with its end token where a document ends."""
    n_bytes: list[int]
    """UTF-8 bytes of each part."""


def encode_parts(tokenizer: Tokenizer, parts: Sequence[Part], *, end_id: int, dtype: str) -> Encoded:
    rows = tokenizer.encode_batch([part.text for part in parts], add_specials=False)
    for row, part in zip(rows, parts, strict=True):
        if part.ends:
            row.append(end_id)
    return encoded_rows(rows, parts, dtype=dtype)


def encoded_rows(rows: Sequence[list[int]], parts: Sequence[Part], *, dtype: str) -> Encoded:
    """`rows`: each part's ids."""
    lengths = [len(row) for row in rows]
    return Encoded(
        tokens=np.fromiter(chain.from_iterable(rows), dtype=np.dtype(dtype).newbyteorder("<"), count=sum(lengths)),
        lengths=lengths,
        n_bytes=[len(part.text.encode()) for part in parts],
    )


@contextmanager
def one_thread_a_call() -> Iterator[None]:
    """Keeps `tokenizers` from starting threads of its own below ours: n_workers means that many."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class ShardWriter:
    def __init__(self, folder: Path, number: int, *, open_bytes: int) -> None:
        """`open_bytes`: what earlier shards hold of the document that this one begins with."""
        self._folder = folder
        self._path = tokens_file(folder, number)
        self._documents_path = documents_file(folder, number)
        with writing(self._path, 0):
            self._stream = aside_of(self._path).open("wb")
        self._hash = blake2b(digest_size=32)
        self._ends: list[int] = []
        self._document_bytes: list[int] = []
        self._n_written = 0
        self.n_tokens = 0
        self.n_bytes = 0
        self.open_bytes = open_bytes

    def add(self, parts: Sequence[Part], encoded: Encoded) -> None:
        data = encoded.tokens.tobytes()
        with writing(self._path, len(data)):
            self._stream.write(data)
        self._hash.update(data)
        self._n_written += len(data)
        for part, length, n_bytes in zip(parts, encoded.lengths, encoded.n_bytes, strict=True):
            self.n_tokens += length
            self.n_bytes += n_bytes
            self.open_bytes += n_bytes
            if part.ends:
                self._ends.append(self.n_tokens)
                self._document_bytes.append(self.open_bytes)
                self.open_bytes = 0

    def finish(self) -> ShardRecord:
        """After this the shard stands on the disk, whatever happens next."""
        documents = np.array([self._ends, self._document_bytes], dtype="<u8").tobytes()
        write_whole(self._documents_path, documents)
        with writing(self._path, self._n_written):
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
            aside_of(self._path).replace(self._path)
            sync_folder(self._folder)
        return ShardRecord(
            n_tokens=self.n_tokens,
            n_documents=len(self._ends),
            n_bytes=self.n_bytes,
            tokens_hash=self._hash.hexdigest(),
            documents_hash=blake2b(documents, digest_size=32).hexdigest(),
        )

    def abandon(self) -> None:
        """Leave nothing behind but what was finished; a failing disk may refuse even this."""
        try:
            self._stream.close()
            aside_of(self._path).unlink(missing_ok=True)
        except OSError:
            return
