"""Store tokens on disk in memory-mapped files.

index.json            counts, tokenizer fingerprint, sources and the hash of each file
tokens-00000.bin      ids as uint16 if the vocabulary is small enough, otherwise uint32 (little endian)
documents-00000.bin   end positions (exclusive) and UTF-8 lengths of the documents that end in the shard, as uint64
tokenizer.json, tokenizer_config.json
"""

import json
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from qkv.config.base import Config, Count
from qkv.data.file_io import read_json_object
from qkv.errors import ConfigError, InputError
from qkv.text import Tokenizer, load_tokenizer

INDEX_FILE = "index.json"
NonNegativeInt = Annotated[int, Field(strict=True, ge=0)]


@runtime_checkable
class TokenSource(Protocol):
    """Source of tokens for batches, such as a token store, a slice of one or an object that computes tokens."""

    @property
    def n_tokens(self) -> int: ...
    @property
    def n_documents(self) -> int: ...
    @property
    def end_id(self) -> int:
        """Id of the token at the end of each document."""
        ...

    def read(self, start: int, stop: int) -> NDArray[np.int64]: ...
    def document_ids(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the document number of each token. The end token belongs to the document that it ends."""
        ...


class ShardRecord(Config):
    """Sizes and hashes of a shard."""

    n_tokens: Count
    n_documents: NonNegativeInt
    """Number of documents that end in this shard. The last document may continue in the next shard."""
    n_bytes: NonNegativeInt
    """Number of UTF-8 bytes of text in this shard."""
    tokens_hash: str
    documents_hash: str


class SourceRecord(Config):
    """Name, size and hash of a source file."""

    name: str
    size: NonNegativeInt
    hash: str


class StoreIndex(Config):
    """Contents of index.json."""

    format: Literal[1] = 1
    dtype: Literal["uint16", "uint32"]
    vocab_size: Count
    end_id: NonNegativeInt
    tokenizer: str
    """Fingerprint of the tokenizer."""
    n_tokens: Count
    n_documents: Count
    n_bytes: NonNegativeInt
    """Total number of UTF-8 bytes in all documents, excluding end tokens. Used to compute bits per byte."""
    shards: tuple[ShardRecord, ...]
    sources: tuple[SourceRecord, ...]


def tokens_file(folder: Path, number: int) -> Path:
    return folder / f"tokens-{number:05d}.bin"


def documents_file(folder: Path, number: int) -> Path:
    return folder / f"documents-{number:05d}.bin"


class TokenStore:
    """A complete token store. Opening a store reads only the index, and shards are memory-mapped on first use."""

    def __init__(self, folder: Path, index: StoreIndex) -> None:
        self.folder = folder
        self.index = index
        # Start of each shard, counted in tokens and in documents, followed by the total.
        self._first_token = _cumulative_starts([shard.n_tokens for shard in index.shards])
        self._first_document = _cumulative_starts([shard.n_documents for shard in index.shards])
        self._tokens: dict[int, NDArray[Any]] = {}
        self._ends: dict[int, NDArray[np.uint64]] = {}

    @classmethod
    def open(cls, folder: str | Path, *, verify: bool = False) -> Self:
        """Open a store and check its index and file sizes. With `verify`, the hashes of all files are also checked."""
        folder = Path(folder)
        store = cls(folder, _read_verified_index(folder / INDEX_FILE))
        for number, shard in enumerate(store.index.shards):
            check_shard_sizes_and_hashes(folder, number, shard, itemsize=store._dtype.itemsize, check_hashes=verify)
        return store

    @property
    def n_tokens(self) -> int:
        return self.index.n_tokens

    @property
    def n_documents(self) -> int:
        return self.index.n_documents

    @property
    def n_bytes(self) -> int:
        return self.index.n_bytes

    @property
    def vocab_size(self) -> int:
        return self.index.vocab_size

    @property
    def end_id(self) -> int:
        return self.index.end_id

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer of the store."""
        tokenizer = load_tokenizer(self.folder)
        if tokenizer.fingerprint != self.index.tokenizer:
            raise InputError(f"{self.folder}: tokenizer.json does not match the fingerprint in the index")
        return tokenizer

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        self._check_range(start, stop)
        parts = [
            self._memory_mapped_shard_tokens(shard)[low:high]
            for shard, low, high in self._split_range_by_shard(start, stop)
        ]
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)

    def take(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens at arbitrary positions."""
        if len(self.index.shards) == 1:
            return self._memory_mapped_shard_tokens(0)[positions].astype(np.int64)
        tokens = np.empty(positions.shape, np.int64)
        shards = np.searchsorted(self._first_token, positions, side="right") - 1
        for shard in np.unique(shards):
            in_shard = shards == shard
            tokens[in_shard] = self._memory_mapped_shard_tokens(int(shard))[
                positions[in_shard] - self._first_token[shard]
            ]
        return tokens

    def document_ends(self) -> NDArray[np.int64]:
        """Return the end positions (exclusive) of all documents."""
        shards = range(len(self.index.shards))
        return np.concatenate([self._shard_document_ends(n).astype(np.int64) + self._first_token[n] for n in shards])

    def document_ids(self, start: int, stop: int) -> NDArray[np.int64]:
        self._check_range(start, stop)
        parts = []
        for shard, low, high in self._split_range_by_shard(start, stop):
            # Document ends are exclusive, so the token at an end belongs to the next document (`side="right"`).
            local = np.searchsorted(
                self._shard_document_ends(shard), np.arange(low, high, dtype=np.uint64), side="right"
            )
            parts.append(local + self._first_document[shard])
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)

    def document(self, number: int) -> NDArray[np.int64]:
        """Return the ids of a document, including its end token."""
        if not 0 <= number < self.n_documents:
            raise InputError(f"document {number} is out of range for a store of {self.n_documents} documents")
        start = 0 if number == 0 else self._document_end(number - 1)
        return self.read(start, self._document_end(number))

    def _document_end(self, number: int) -> int:
        shard = int(np.searchsorted(self._first_document, number, side="right")) - 1
        return int(self._first_token[shard]) + int(
            self._shard_document_ends(shard)[number - self._first_document[shard]]
        )

    def document_bytes(self) -> NDArray[np.int64]:
        """Return the number of UTF-8 bytes in each document."""
        tables = [self._document_table(shard) for shard in range(len(self.index.shards))]
        return np.concatenate([table[len(table) // 2 :] for table in tables]).astype(np.int64)

    def slice(self, start: int, stop: int) -> "TokenStoreSlice":
        """Return a view of the tokens [start, stop), for example for training or validation."""
        return TokenStoreSlice(self, start, stop)

    @property
    def _dtype(self) -> np.dtype[Any]:
        return np.dtype(self.index.dtype).newbyteorder("<")

    def _split_range_by_shard(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Split a token range by shard, and return (shard, start, stop) for each part."""
        spans = []
        shard = int(np.searchsorted(self._first_token, start, side="right")) - 1
        while start < stop:
            first, last = int(self._first_token[shard]), int(self._first_token[shard + 1])
            spans.append((shard, start - first, min(stop, last) - first))
            start, shard = last, shard + 1
        return spans

    def _memory_mapped_shard_tokens(self, shard: int) -> NDArray[Any]:
        if shard not in self._tokens:
            # Convert to a plain array because indexing a memmap is several times slower.
            self._tokens[shard] = np.asarray(np.memmap(tokens_file(self.folder, shard), dtype=self._dtype, mode="r"))
        return self._tokens[shard]

    def _shard_document_ends(self, shard: int) -> NDArray[np.uint64]:
        if shard not in self._ends:
            table = self._document_table(shard)
            self._ends[shard] = table[: len(table) // 2]
        return self._ends[shard]

    def _document_table(self, shard: int) -> NDArray[np.uint64]:
        if not self.index.shards[shard].n_documents:  # an empty file cannot be memory-mapped
            return np.empty(0, np.uint64)
        return np.memmap(documents_file(self.folder, shard), dtype="<u8", mode="r")

    def _check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.n_tokens:
            raise InputError(f"tokens {start} to {stop} are out of range for a store of {self.n_tokens} tokens")


class TokenStoreSlice:
    """A contiguous range of the tokens in a source. The documents in the range are numbered from 0."""

    def __init__(self, source: TokenSource, start: int, stop: int) -> None:
        if not 0 <= start < stop <= source.n_tokens:
            raise InputError(f"tokens {start} to {stop} are not a valid slice of a store of {source.n_tokens} tokens")
        self._source = source
        self._start = start
        self.n_tokens = stop - start
        self.end_id = source.end_id
        self._first = int(source.document_ids(start, start + 1)[0])
        self.n_documents = int(source.document_ids(stop - 1, stop)[0]) - self._first + 1

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        self._check_range(start, stop)
        return self._source.read(self._start + start, self._start + stop)

    def document_ids(self, start: int, stop: int) -> NDArray[np.int64]:
        self._check_range(start, stop)
        return self._source.document_ids(self._start + start, self._start + stop) - self._first

    def _check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.n_tokens:
            raise InputError(f"tokens {start} to {stop} are out of range for a slice of {self.n_tokens} tokens")


def check_shard_sizes_and_hashes(
    folder: Path, number: int, shard: ShardRecord, *, itemsize: int, check_hashes: bool
) -> None:
    tokens, document_ids = tokens_file(folder, number), documents_file(folder, number)
    _check_file_size(tokens, shard.n_tokens * itemsize)
    _check_file_size(document_ids, shard.n_documents * 16)
    if check_hashes:
        _check_file_hash(tokens, shard.tokens_hash)
        _check_file_hash(document_ids, shard.documents_hash)


def serialize_index(index: StoreIndex) -> bytes:
    """Serialize the index as JSON, including its hash."""
    content = index.model_dump(mode="json")
    return (json.dumps({**content, "hash": _hash_content(content)}, indent=1) + "\n").encode()


def _read_verified_index(path: Path) -> StoreIndex:
    if not path.is_file():
        raise InputError(f"{path.parent}: not a token store ({INDEX_FILE} is missing)")
    content = read_json_object(path)
    stored_hash = content.pop("hash", None)
    try:
        index = StoreIndex(**content)
    except (ConfigError, TypeError) as error:
        raise InputError(f"{path}: {error}") from None
    if stored_hash != _hash_content(content):
        raise InputError(f"{path}: hash mismatch; the file was modified after it was written")
    for name in ("n_tokens", "n_documents", "n_bytes"):
        total = sum(getattr(shard, name) for shard in index.shards)
        if total != getattr(index, name):
            raise InputError(f"{path}: {name} is {getattr(index, name)}, but the shards contain {total} in total")
    return index


def _hash_content(content: dict[str, Any]) -> str:
    return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=32).hexdigest()


def _check_file_size(path: Path, expected: int) -> None:
    if not path.is_file():
        raise InputError(f"{path}: file is missing from the store")
    if path.stat().st_size != expected:
        raise InputError(f"{path}: expected {expected} bytes according to the index, got {path.stat().st_size}")


def _check_file_hash(path: Path, expected: str) -> None:
    digest = blake2b(digest_size=32)
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise InputError(f"{path}: hash mismatch; the file was modified after it was written")


def _cumulative_starts(counts: list[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
