"""Encode document chunks and write them to shards of a token store."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qkv.data.documents import DocumentChunk
from qkv.data.file_io import convert_os_errors_to_disk_error, fsync_path, partial_path, write_atomically
from qkv.data.token_store import ShardRecord, documents_file, tokens_file
from qkv.text import Tokenizer


@dataclass(frozen=True)
class EncodedChunks:
    """Token ids of document chunks, including end tokens."""

    tokens: NDArray[np.uint16] | NDArray[np.uint32]
    lengths: list[int]
    """Number of tokens in each chunk, including any document end token."""
    n_bytes: list[int]
    """Number of UTF-8 bytes in each chunk."""


def encode_chunks_with_document_ends(
    tokenizer: Tokenizer, chunks: Sequence[DocumentChunk], *, end_id: int, dtype: str
) -> EncodedChunks:
    """Encode document chunks, adding `end_id` after each document."""
    rows = tokenizer.encode_batch([chunk.text for chunk in chunks], add_special_tokens=False)
    for row, chunk in zip(rows, chunks, strict=True):
        if chunk.is_last:
            row.append(end_id)
    return pack_encoded_chunks(rows, chunks, dtype=dtype)


def pack_encoded_chunks(rows: Sequence[list[int]], chunks: Sequence[DocumentChunk], *, dtype: str) -> EncodedChunks:
    """Concatenate the token ids of all chunks into one array. `rows` contains the ids of each chunk."""
    lengths = [len(row) for row in rows]
    return EncodedChunks(
        tokens=np.fromiter(chain.from_iterable(rows), dtype=np.dtype(dtype).newbyteorder("<"), count=sum(lengths)),
        lengths=lengths,
        n_bytes=[len(chunk.text.encode()) for chunk in chunks],
    )


@contextmanager
def disable_tokenizer_threads() -> Iterator[None]:
    """Prevent `tokenizers` from starting its own threads so that `n_workers` is the total number of threads."""
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
    """Writer that hashes a shard, stores it in temporary files, and renames them when the shard is complete."""

    def __init__(self, folder: Path, number: int, *, open_document_bytes: int) -> None:
        """Create the temporary file.

        `open_document_bytes` is the number of bytes that earlier shards already contain of the unfinished document.
        """
        self._folder = folder
        self._path = tokens_file(folder, number)
        self._documents_path = documents_file(folder, number)
        with convert_os_errors_to_disk_error(self._path, 0):
            self._stream = partial_path(self._path).open("wb")
        self._hash = blake2b(digest_size=32)
        self._ends: list[int] = []
        self._document_bytes: list[int] = []
        self._n_written = 0
        self.n_tokens = 0
        self.n_bytes = 0
        self.open_document_bytes = open_document_bytes

    def add(self, chunks: Sequence[DocumentChunk], encoded: EncodedChunks) -> None:
        data = encoded.tokens.tobytes()
        with convert_os_errors_to_disk_error(self._path, len(data)):
            self._stream.write(data)
        self._hash.update(data)
        self._n_written += len(data)
        for chunk, length, n_bytes in zip(chunks, encoded.lengths, encoded.n_bytes, strict=True):
            self.n_tokens += length
            self.n_bytes += n_bytes
            self.open_document_bytes += n_bytes
            if chunk.is_last:
                self._ends.append(self.n_tokens)
                self._document_bytes.append(self.open_document_bytes)
                self.open_document_bytes = 0

    def finish(self) -> ShardRecord:
        """Flush the shard to disk and rename it so that it survives a crash."""
        documents = np.array([self._ends, self._document_bytes], dtype="<u8").tobytes()
        write_atomically(self._documents_path, documents)
        with convert_os_errors_to_disk_error(self._path, self._n_written):
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
            partial_path(self._path).replace(self._path)
            fsync_path(self._folder)
        return ShardRecord(
            n_tokens=self.n_tokens,
            n_documents=len(self._ends),
            n_bytes=self.n_bytes,
            tokens_hash=self._hash.hexdigest(),
            documents_hash=blake2b(documents, digest_size=32).hexdigest(),
        )

    def discard(self) -> None:
        """Delete the temporary file. Errors are ignored because the disk may be failing."""
        try:
            self._stream.close()
            partial_path(self._path).unlink(missing_ok=True)
        except OSError:
            return
