"""Tokenize text files into a token store in parallel. Interrupted preparations can be resumed.

The contents of the store depend only on the sources, the tokenizer and the shard size. Each finished shard is flushed
to disk, renamed, and recorded in `progress.json` with the position in the sources at which the next shard starts.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qkv.choices import SpecialToken
from qkv.config.base import Config
from qkv.data.documents import (
    STANDARD_INPUT,
    DocumentChunk,
    ProgressCallback,
    TextSource,
    open_raw_and_decompressed,
    parse_text_sources,
    read_chunks,
)
from qkv.data.file_io import (
    convert_os_errors_to_disk_error,
    fsync_path,
    partial_path,
    read_json_object,
    write_atomically,
)
from qkv.data.sentence_splitter import split_sentences
from qkv.data.token_store import (
    INDEX_FILE,
    ShardRecord,
    SourceRecord,
    StoreIndex,
    TokenStore,
    check_shard_sizes_and_hashes,
    documents_file,
    serialize_index,
    tokens_file,
)
from qkv.errors import ConfigError, InputError
from qkv.text import Tokenizer, save_tokenizer

PROGRESS_FILE = "progress.json"
SHARD_TOKENS = 1 << 25
"""Number of tokens per shard.

At most one shard is lost when a preparation is interrupted. Writing a shard takes about a minute on two cores.
"""
_GROUP_CHARACTERS = (
    1 << 20
)  # characters per task; large enough to hide the overhead of a call and small enough to use little memory


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


def encode_chunks_with_sentence_ends(
    tokenizer: Tokenizer, chunks: Sequence[DocumentChunk], *, end_id: int, dtype: str
) -> EncodedChunks:
    """Encode document chunks, adding `end_id` after each sentence.

    There is no `end_id` between the chunks of a document because the boundary may be within a sentence.
    """
    split = [split_sentences(chunk.text) for chunk in chunks]
    encoded = iter(tokenizer.encode_batch([*chain.from_iterable(split)], add_special_tokens=False))
    rows: list[list[int]] = []
    for sentences, chunk in zip(split, chunks, strict=True):
        ids = [number for row in islice(encoded, len(sentences)) if row for number in (*row, end_id)]
        if not chunk.is_last:
            ids = ids[:-1]
        rows.append(ids or [end_id] * chunk.is_last)
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


def available_cores() -> int:
    """Return the number of CPU cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare_store(
    paths: Sequence[str | Path],
    folder: str | Path,
    *,
    tokenizer: Tokenizer,
    field: str = "text",
    n_workers: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    sentences: bool = False,
    progress: ProgressCallback | None = None,
) -> TokenStore:
    """Tokenize text files into a token store.

    `folder` must be new or empty, or contain an interrupted preparation of the same store, which is then resumed. With
    `sentences`, the separator follows each sentence instead of each document (see `SentenceStore`). By default,
    `n_workers` is the number of available cores. For `field`, see `read_chunks`.
    """
    folder = Path(folder)
    sources = parse_text_sources(paths)
    end_id = tokenizer.special_id(SpecialToken.SEP) if sentences else _eos_or_sep_id(tokenizer)
    plan = _make_preparation_plan(
        sources, tokenizer=tokenizer, field=field, shard_tokens=shard_tokens, sentences=sentences
    )
    state = _begin_or_resume(folder, plan, tokenizer)
    if not (folder / INDEX_FILE).exists():
        encode = partial(
            encode_chunks_with_sentence_ends if sentences else encode_chunks_with_document_ends,
            tokenizer,
            end_id=end_id,
            dtype=plan.dtype,
        )
        groups = _encode_groups(
            _read_remaining_chunk_groups(sources, field, state), encode, n_workers or available_cores()
        )
        total = 0 if any(source.name == STANDARD_INPUT for source in sources) else sum(plan.sizes)
        state = _write_shards(folder, state, groups, progress=progress, total=total)
        _write_index(folder, state, tokenizer=tokenizer, end_id=end_id)
    with convert_os_errors_to_disk_error(folder, 0):
        (folder / PROGRESS_FILE).unlink(missing_ok=True)
    return TokenStore.open(folder)


class PreparationPlan(Config):
    """All inputs that determine the contents of a store. A preparation can be resumed only if its plan is unchanged."""

    sources: tuple[str, ...]
    sizes: tuple[int, ...]
    modified_ns: tuple[int, ...]
    """Modification time of each source in nanoseconds."""
    tokenizer: str
    dtype: str
    field: str
    shard_tokens: int
    sentences: bool = False


class PreparationState(Config):
    """Progress of a preparation after a finished shard."""

    plan: PreparationPlan
    shards: tuple[ShardRecord, ...] = ()
    sources: tuple[SourceRecord, ...] = ()
    """Sources that have been processed completely."""
    n_chunks: int = 0
    """Number of chunks from the next source that have already been written to a shard."""
    open_document_bytes: int = 0


@dataclass(frozen=True)
class _ChunkGroup:
    """A group of chunks from one source that are encoded together."""

    chunks: list[DocumentChunk]
    n_chunks: int
    """Number of chunks in the source up to the end of this group."""
    total_bytes_read: int
    """Total number of bytes read from all sources so far."""
    finished_source: SourceRecord | None
    """Record of the source if this is the source's last group, otherwise None."""


def is_unfinished(folder: str | Path) -> bool:
    """Return whether the folder contains an interrupted preparation that `prepare_store` can resume."""
    return (Path(folder) / PROGRESS_FILE).is_file()


def _eos_or_sep_id(tokenizer: Tokenizer) -> int:
    for role in (SpecialToken.EOS, SpecialToken.SEP):
        if (end_id := tokenizer.find_special_id(role)) is not None:
            return end_id
    raise InputError("the tokenizer has neither an eos_token nor a sep_token to mark the end of documents")


def _make_preparation_plan(
    sources: list[TextSource], *, tokenizer: Tokenizer, field: str, shard_tokens: int, sentences: bool
) -> PreparationPlan:
    if shard_tokens < 1:
        raise ConfigError(f"shard_tokens must be at least 1, got {shard_tokens}")
    files = [None if source.name == STANDARD_INPUT else Path(source.path).stat() for source in sources]
    return PreparationPlan(
        sources=tuple(source.name for source in sources),
        sizes=tuple(0 if file is None else file.st_size for file in files),
        modified_ns=tuple(0 if file is None else file.st_mtime_ns for file in files),
        tokenizer=tokenizer.fingerprint,
        dtype="uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32",
        field=field,
        shard_tokens=shard_tokens,
        sentences=sentences,
    )


def _begin_or_resume(folder: Path, plan: PreparationPlan, tokenizer: Tokenizer) -> PreparationState:
    """Create a new store folder, or load the state of an interrupted preparation and verify its shards."""
    if is_unfinished(folder):
        state = _read_preparation_state(folder / PROGRESS_FILE)
        if state.plan == plan and STANDARD_INPUT not in plan.sources:
            for number, shard in enumerate(state.shards):
                itemsize = 2 if plan.dtype == "uint16" else 4
                check_shard_sizes_and_hashes(folder, number, shard, itemsize=itemsize, check_hashes=True)
            save_tokenizer(tokenizer, folder)
            return state
        if state.shards or (folder / INDEX_FILE).exists():
            differs = [
                name for name in PreparationPlan.model_fields if getattr(plan, name) != getattr(state.plan, name)
            ]
            reason = (
                f"these settings have changed: {', '.join(differs)}"
                if differs
                else "standard input cannot be read a second time"
            )
            raise InputError(f"{folder}: cannot resume the unfinished store because {reason}. Use a new folder")
    elif folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: expected a folder, got a file")
    elif (folder / INDEX_FILE).exists():
        raise InputError(f"{folder}: already contains a complete store; use a new folder")
    elif folder.is_dir() and (existing := sorted(p.name for p in folder.iterdir() if p.suffix != ".partial")):
        raise InputError(f"{folder}: the folder is not empty (it contains {existing[0]}); use a new folder")
    state = PreparationState(plan=plan)
    with convert_os_errors_to_disk_error(folder, 0):
        folder.mkdir(parents=True, exist_ok=True)
    _write_preparation_state(folder, state)
    save_tokenizer(tokenizer, folder)
    return state


def _read_remaining_chunk_groups(
    sources: list[TextSource], field: str, state: PreparationState
) -> Iterator[_ChunkGroup]:
    """Read the remaining chunks and yield them in groups. All chunks in a group are from the same source."""
    total_bytes_read = sum(record.size for record in state.sources)
    for number in range(len(state.sources), len(sources)):
        source = sources[number]
        skipped = state.n_chunks if number == len(state.sources) else 0
        with open_raw_and_decompressed(source) as (opened, stream):
            chunks: list[DocumentChunk] = []
            n_chunks = size = 0
            for chunk in read_chunks(source, stream, field=field):
                n_chunks += 1
                if n_chunks <= skipped:
                    continue
                chunks.append(chunk)
                size += len(chunk.text)
                if size >= _GROUP_CHARACTERS:
                    yield _ChunkGroup(chunks, n_chunks, total_bytes_read + opened.n_bytes, finished_source=None)
                    chunks, size = [], 0
            digest = opened.read_rest_and_hexdigest()
            total_bytes_read += opened.n_bytes
            record = SourceRecord(name=source.name, size=opened.n_bytes, hash=digest)
        yield _ChunkGroup(chunks, n_chunks, total_bytes_read, finished_source=record)


def _encode_groups(
    groups: Iterator[_ChunkGroup], encode: Callable[[list[DocumentChunk]], EncodedChunks], n_workers: int
) -> Iterator[tuple[_ChunkGroup, EncodedChunks]]:
    """Encode groups in parallel threads (`tokenizers` releases the GIL) and yield them in order."""
    waiting: deque[tuple[_ChunkGroup, Future[EncodedChunks]]] = deque()
    with disable_tokenizer_threads(), ThreadPoolExecutor(n_workers, thread_name_prefix="encode") as pool:
        try:
            for group in groups:
                waiting.append((group, pool.submit(encode, group.chunks)))
                if len(waiting) > 2 * n_workers:
                    first, future = waiting.popleft()
                    yield first, future.result()
            for group, future in waiting:
                yield group, future.result()
        finally:
            for _, future in waiting:
                future.cancel()


def _write_shards(
    folder: Path,
    state: PreparationState,
    groups: Iterator[tuple[_ChunkGroup, EncodedChunks]],
    *,
    progress: ProgressCallback | None,
    total: int,
) -> PreparationState:
    sources = list(state.sources)
    writer: ShardWriter | None = None
    try:
        for group, encoded in groups:
            if encoded.lengths:
                writer = writer or ShardWriter(folder, len(state.shards), open_document_bytes=state.open_document_bytes)
                writer.add(group.chunks, encoded)
            n_chunks = group.n_chunks
            if group.finished_source is not None:
                sources.append(group.finished_source)
                n_chunks = 0
            if writer is not None and writer.n_tokens >= state.plan.shard_tokens:
                state = _finish_shard_and_save_state(folder, state, writer, sources=sources, n_chunks=n_chunks)
                writer = None
            if progress is not None:
                progress(group.total_bytes_read, total)
        if writer is not None:
            state = _finish_shard_and_save_state(folder, state, writer, sources=sources, n_chunks=0)
    except BaseException:
        if writer is not None:
            writer.discard()
        raise
    return state.replace(sources=tuple(sources))


def _finish_shard_and_save_state(
    folder: Path, state: PreparationState, writer: ShardWriter, *, sources: list[SourceRecord], n_chunks: int
) -> PreparationState:
    state = state.replace(
        shards=(*state.shards, writer.finish()),
        sources=tuple(sources),
        n_chunks=n_chunks,
        open_document_bytes=writer.open_document_bytes,
    )
    _write_preparation_state(folder, state)
    return state


def _write_index(folder: Path, state: PreparationState, *, tokenizer: Tokenizer, end_id: int) -> None:
    if not state.shards:
        raise InputError(f"{', '.join(state.plan.sources)[:200]}: no text found")
    index = StoreIndex(
        dtype="uint16" if state.plan.dtype == "uint16" else "uint32",
        vocab_size=tokenizer.vocab_size,
        end_id=end_id,
        tokenizer=tokenizer.fingerprint,
        n_tokens=sum(shard.n_tokens for shard in state.shards),
        n_documents=sum(shard.n_documents for shard in state.shards),
        n_bytes=sum(shard.n_bytes for shard in state.shards),
        shards=state.shards,
        sources=state.sources,
    )
    write_atomically(folder / INDEX_FILE, serialize_index(index))


def _write_preparation_state(folder: Path, state: PreparationState) -> None:
    write_atomically(folder / PROGRESS_FILE, state.model_dump_json(indent=1).encode())


def _read_preparation_state(path: Path) -> PreparationState:
    try:
        return PreparationState(**read_json_object(path))
    except (ConfigError, TypeError) as error:
        raise InputError(f"{path}: {error}") from None
