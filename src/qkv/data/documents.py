"""Read documents from text files, JSON Lines files and tables, which may be compressed or in folders.

A document is a text file, a section of it between <|endoftext|> lines, a JSON line or a table row. JSON and table lines
are read into memory as a whole. Other long documents are read in chunks, which are split at points that do not affect
their tokens (see `qkv.text.tokenizer`). Whitespace around documents is removed and empty documents are skipped.
"""

import codecs
import csv
import io
import json
import lzma
import re
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from gzip import GzipFile
from hashlib import blake2b
from importlib import import_module
from io import BufferedIOBase
from itertools import chain, islice
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from qkv.errors import InputError, MissingExtraError
from qkv.text import END_OF_TEXT, MAX_CHUNK_CHARACTERS, split_into_chunks
from qkv.text.tokenizer import find_last_split_point_or_stop

ProgressCallback = Callable[[int, int], None]
"""Function called with the number of bytes read so far and the total number of bytes (0 if unknown)."""
STANDARD_INPUT = "-"
TEXT_SUFFIXES = (".txt", ".md", ".jsonl", ".csv", ".tsv")
_COMPRESSIONS = (".gz", ".xz", ".zst")
_SLICE = re.compile(r"(.+)\[(-?\d+)?:(-?\d+)?\]")
_BLOCK_BYTES = 1 << 20
_SEPARATOR = re.compile(rf"^[^\S\n]*{re.escape(END_OF_TEXT)}[^\S\n]*$", re.MULTILINE)


@dataclass(frozen=True)
class TextSource:
    """A text file or standard input, optionally restricted to a slice of its documents."""

    name: str
    """Name specified by the caller, which is also used in error messages."""
    is_explicit: bool = True
    """Whether the caller named the file. Empty files that were found in a folder are skipped."""
    document_slice: tuple[int | None, int | None] | None = None
    """Slice of the documents to read, or None to read all documents.

    For example, `reviews.txt[:-500]` reads all but the last 500 documents.
    """

    @property
    def path(self) -> str:
        """Path of the file, without the document slice."""
        return self.name if self.document_slice is None else self.name[: self.name.rindex("[")]

    @property
    def file_type(self) -> str:
        """File suffix without the compression suffix, for example `.jsonl` for `a.jsonl.gz`."""
        path = PurePath(self.path)
        return path.with_suffix("").suffix if path.suffix in _COMPRESSIONS else path.suffix

    @property
    def size(self) -> int:
        """Size on disk in bytes, or 0 for standard input."""
        return 0 if self.name == STANDARD_INPUT else Path(self.path).stat().st_size


def parse_text_sources(source_specs: Sequence[str | Path]) -> list[TextSource]:
    """Return the text files to read. Folders are searched recursively, and their files are sorted by path.

    `FILE[:-500]` and `FILE[-500:]` select some of the documents in a file so that training and validation data can be
    in the same file.
    """
    sources = []
    for path in map(str, source_specs):
        if path == STANDARD_INPUT or Path(path).is_file():
            sources.append(TextSource(path))
        elif Path(path).is_dir():
            sources.extend(_find_text_files(Path(path)))
        elif (slice_match := _SLICE.fullmatch(path)) and Path(slice_match[1]).is_file():
            start, stop = (int(number) if number else None for number in slice_match.groups()[1:])
            sources.append(TextSource(path, document_slice=(start, stop)))
        else:
            raise InputError(f"{path}: no such file or folder")
    if [source.name for source in sources].count(STANDARD_INPUT) > 1:
        raise InputError("standard input (-) can only be read once")
    return sources


def resolve_data_files(patterns: tuple[str, ...], data_folder: Path) -> list[Path]:
    """Expand file patterns relative to the data folder.

    Raises `InputError` if a pattern matches no file.
    """
    files = []
    for pattern in patterns:
        path = data_folder / pattern
        matches = sorted(path.parent.glob(path.name)) if "*" in pattern else [path]
        if not matches:
            raise InputError(f"{path}: no file matches this path")
        files += matches
    parse_text_sources(files)
    return files


def parse_single_file_source(path: str | Path) -> TextSource:
    """Return the source for a single file to read line by line. Folders and document slices are rejected."""
    if Path(path).is_dir():
        raise InputError(f"{path}: expected a file, got a folder")
    sources = parse_text_sources([path])
    if sources[0].document_slice is not None:
        raise InputError(f"{path}: document slices ([start:stop]) are not supported for this file")
    return sources[0]


class HashingReader(io.RawIOBase):
    """Raw stream that counts and hashes the bytes read from another stream."""

    def __init__(self, stream: BinaryIO | io.RawIOBase | io.BufferedIOBase) -> None:
        self._stream = stream
        self._hash = blake2b(digest_size=32)
        self.n_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - any writable buffer
        data = self._stream.read(len(buffer)) or b""
        buffer[: len(data)] = data
        self._hash.update(data)
        self.n_bytes += len(data)
        return len(data)

    def read_rest_and_hexdigest(self) -> str:
        """Read any bytes that the decompressor did not read, and return the hash of the entire file."""
        while self.read(1 << 20):
            pass
        return self._hash.hexdigest()


@contextmanager
def open_raw_and_decompressed(source: TextSource) -> Iterator[tuple[HashingReader, io.BufferedIOBase]]:
    """Open a source and yield its raw stream and decompressed stream. Read errors are converted to `InputError`."""
    try:
        with io.BytesIO() if source.name == STANDARD_INPUT else Path(source.path).open("rb", buffering=0) as file:
            opened = HashingReader(sys.stdin.buffer if source.name == STANDARD_INPUT else file)
            yield opened, _open_decompressed(source, opened)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"{source.name}: cannot be read: {reason}") from None


def _open_decompressed(source: TextSource, opened: HashingReader) -> io.BufferedIOBase:
    buffered = io.BufferedReader(opened, 1 << 20)
    match PurePath(source.path).suffix:
        case ".gz":
            return GzipFile(fileobj=buffered)
        case ".xz":
            return lzma.LZMAFile(buffered)
        case ".zst":
            return _open_zstandard(source, buffered)
        case _:
            return buffered


def _open_zstandard(source: TextSource, stream: io.BufferedIOBase) -> io.BufferedIOBase:
    try:
        zstandard = import_module("zstandard")
    except ImportError:
        raise MissingExtraError(
            f"{source.name}: .zst files require the zstandard package; install it with: pip install 'qkv[formats]'"
        ) from None
    inner = zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True)
    return io.BufferedReader(_ZstandardReaderWithOSErrors(inner, zstandard.ZstdError), 1 << 20)


class _ZstandardReaderWithOSErrors(io.RawIOBase):
    """Reader that converts zstandard errors to `OSError`, which the other decompressors raise."""

    def __init__(self, inner: Any, error: type[Exception]) -> None:  # noqa: ANN401 - a type of an optional library
        self._inner = inner
        self._error = error

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - any writable buffer
        try:
            return self._inner.readinto(buffer)
        except self._error as error:
            raise OSError(str(error)) from None


def _find_text_files(folder: Path) -> list[TextSource]:
    try:
        paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    except OSError as error:  # deleted or not permitted
        raise InputError(f"{folder}: cannot be read: {error.strerror}: {error.filename}") from None
    sources = [TextSource(str(path), is_explicit=False) for path in paths]
    texts = [source for source in sources if source.file_type in TEXT_SUFFIXES]
    if not texts:
        raise InputError(
            f"{folder}: no text files found ({', '.join(TEXT_SUFFIXES)}, optionally with .gz, .xz or .zst)"
        )
    return texts


@dataclass(frozen=True, slots=True)
class DocumentChunk:
    """A complete document, or one chunk of a long document. Concatenating the chunks gives the document."""

    text: str
    is_last: bool
    """Whether this is the last chunk of its document."""


def read_documents(paths: Sequence[str | Path], *, field: str = "text") -> Iterator[str]:
    """Yield complete documents. Use `read_chunks` if a document may be too large to fit in memory."""
    for source in parse_text_sources(paths):
        with open_raw_and_decompressed(source) as (_, stream):
            chunks: list[str] = []
            for chunk in read_chunks(source, stream, field=field):
                chunks.append(chunk.text)
                if chunk.is_last:
                    yield "".join(chunks)
                    chunks = []


def read_text_chunks(
    paths: Sequence[str | Path],
    *,
    field: str = "text",
    stop_after_characters: int | None = None,
    progress: ProgressCallback | None = None,
) -> Iterator[str]:
    """Yield texts without document boundaries, for example to train a tokenizer.

    Stops after about `stop_after_characters` characters. `progress` is called with the number of bytes read and the
    total.
    """
    sources = parse_text_sources(paths)
    total, done, n_characters = sum(source.size for source in sources), 0, 0
    for source in sources:
        with open_raw_and_decompressed(source) as (opened, stream):
            for chunk in read_chunks(source, stream, field=field):
                yield chunk.text
                n_characters += len(chunk.text)
                if progress is not None:
                    progress(done + opened.n_bytes, total)
                if stop_after_characters is not None and n_characters >= stop_after_characters:
                    return
            done += opened.n_bytes


def read_chunks(source: TextSource, stream: BufferedIOBase, *, field: str = "text") -> Iterator[DocumentChunk]:
    """Yield the documents in a file in chunks. The parser depends on the file type.

    `field` is the key of the text in .jsonl lines, or the column in tables: a name from the header row, or a number
    (counted from 1) for tables without a header. Cells of .csv files may be quoted. In .tsv files, quotation marks are
    ordinary characters.
    """
    empty = True
    chunks = _read_jsonl_csv_or_text(source, stream, field)
    for chunk in chunks if source.document_slice is None else _slice_documents(chunks, *source.document_slice):
        empty = False
        yield chunk
    if empty and source.is_explicit:
        raise InputError(f"{source.name}: contains no text")


def _read_jsonl_csv_or_text(source: TextSource, stream: BufferedIOBase, field: str) -> Iterator[DocumentChunk]:
    match source.file_type:
        case ".jsonl":
            texts = _read_jsonl_texts(source.name, stream, field)
        case ".csv" | ".tsv":
            texts = _read_csv_or_tsv_column(source.name, stream, field, is_tsv=source.file_type == ".tsv")
        case _:
            return _split_at_endoftext_lines(_decode_utf8_blocks(source.name, stream))
    return (chunk for text in texts for chunk in _strip_and_split_into_chunks(text))


def _slice_documents(chunks: Iterator[DocumentChunk], start: int | None, stop: int | None) -> Iterator[DocumentChunk]:
    """Yield the chunks of documents[start:stop]. Negative indices require keeping that many documents in memory."""
    documents = _group_by_document(chunks)
    if start is not None and start < 0:
        last = deque(enumerate(documents), maxlen=-start)
        n = last[-1][0] + 1 if last else 0
        end = n if stop is None else stop + n if stop < 0 else stop
        chosen = (document for number, document in last if number < end)
    elif stop is not None and stop < 0:
        chosen = islice(_all_but_last(documents, -stop), start, None)
    else:
        chosen = islice(documents, start, stop)
    return chain.from_iterable(chosen)


def _group_by_document(chunks: Iterator[DocumentChunk]) -> Iterator[list[DocumentChunk]]:
    document: list[DocumentChunk] = []
    for chunk in chunks:
        document.append(chunk)
        if chunk.is_last:
            yield document
            document = []


def _all_but_last(documents: Iterator[list[DocumentChunk]], n: int) -> Iterator[list[DocumentChunk]]:
    delayed: deque[list[DocumentChunk]] = deque()
    for document in documents:
        delayed.append(document)
        if len(delayed) > n:
            yield delayed.popleft()


def _strip_and_split_into_chunks(document: str) -> Iterator[DocumentChunk]:
    document = document.strip()
    if document:
        *firsts, last = split_into_chunks(document)
        for first in firsts:
            yield DocumentChunk(first, is_last=False)
        yield DocumentChunk(last, is_last=True)


def _split_at_endoftext_lines(blocks: Iterator[str]) -> Iterator[DocumentChunk]:
    """Split text at separator lines, and split long documents into chunks without reading them to the end first."""
    buffer, has_started = "", False
    for block in blocks:
        buffer += block
        complete = buffer.rfind("\n") + 1  # the last line may be incomplete and still become a separator
        start = 0
        for separator in _SEPARATOR.finditer(buffer, 0, complete):
            if separator.start() == 0 and has_started:
                continue  # the line started in the previous chunk, so it is not a separator
            yield from _split_document_or_rest(buffer[start : separator.start()], is_continuation=has_started)
            start, has_started = separator.end(), False
        buffer = buffer[start:] if has_started else buffer[start:].lstrip()
        while len(buffer.rstrip()) > MAX_CHUNK_CHARACTERS:
            end = find_last_split_point_or_stop(buffer, start=0, stop=MAX_CHUNK_CHARACTERS)
            yield DocumentChunk(buffer[:end], is_last=False)
            buffer, has_started = buffer[end:], True
    start = 0
    for separator in _SEPARATOR.finditer(buffer):
        if not (separator.start() == 0 and has_started):
            yield from _split_document_or_rest(buffer[start : separator.start()], is_continuation=has_started)
            start, has_started = separator.end(), False
    yield from _split_document_or_rest(buffer[start:], is_continuation=has_started)


def _split_document_or_rest(text: str, *, is_continuation: bool) -> Iterator[DocumentChunk]:
    """Yield the rest of a document, or the complete document if no chunk has been yielded yet."""
    if not is_continuation:
        yield from _strip_and_split_into_chunks(text)
        return
    *firsts, last = split_into_chunks(text.rstrip())
    for first in firsts:
        yield DocumentChunk(first, is_last=False)
    yield DocumentChunk(last, is_last=True)


def _decode_utf8_blocks(name: str, stream: BufferedIOBase) -> Iterator[str]:
    """Decode a stream in blocks of equal size so that the chunks do not depend on the decompressor."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    offset, line = 0, 1
    while True:
        data = _read_fixed_size_block(stream)
        pending = len(decoder.getstate()[0])
        _check_not_binary(name, data, offset=offset)
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            line += error.object.count(b"\n", 0, error.start)
            raise _utf8_error(name, error, offset=offset - pending, line=line) from None
        offset += len(data)
        line += text.count("\n")
        if text:
            yield text
        if not data:
            return


def _read_fixed_size_block(stream: BufferedIOBase) -> bytes:
    blocks: list[bytes] = []
    missing = _BLOCK_BYTES
    while missing and (data := stream.read(missing)):
        blocks.append(data)
        missing -= len(data)
    return b"".join(blocks)


def read_utf8_lines(name: str, stream: BufferedIOBase) -> Iterator[str]:
    """Yield UTF-8 lines from a stream. Raises `InputError` for binary or otherwise invalid data."""
    offset = 0
    for number, data in enumerate(stream, start=1):
        _check_not_binary(name, data, offset=offset)
        try:
            yield data.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise _utf8_error(name, error, offset=offset, line=number) from None
        offset += len(data)


def _check_not_binary(name: str, data: bytes, *, offset: int) -> None:
    if (nul := data.find(b"\0")) >= 0:
        raise InputError(f"{name}: not a text file: byte {offset + nul} is NUL")


def _utf8_error(name: str, error: UnicodeDecodeError, *, offset: int, line: int) -> InputError:
    byte = error.object[error.start]
    return InputError(f"{name}: line {line}: invalid UTF-8 at byte {offset + error.start} (0x{byte:02X})")


def _read_jsonl_texts(name: str, stream: BufferedIOBase, field: str) -> Iterator[str]:
    for number, line in enumerate(read_utf8_lines(name, stream), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{name}: line {number}: invalid JSON: {error}") from None
        if not isinstance(record, dict):
            raise InputError(f"{name}: line {number}: expected a JSON object, got {type(record).__name__}")
        if field not in record:
            available = ", ".join(map(str, record)) or "none"
            raise InputError(f"{name}: line {number}: field '{field}' not found; available fields: {available[:200]}")
        text = record[field]
        if not isinstance(text, str):
            raise InputError(f"{name}: line {number}: field '{field}' must be a string, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError(f"{name}: line {number}: field '{field}' contains an unpaired surrogate") from None
        yield text


def _read_csv_or_tsv_column(name: str, stream: BufferedIOBase, field: str, *, is_tsv: bool) -> Iterator[str]:
    csv.field_size_limit(2**31 - 1)  # the default limit of 128 KB is too small for documents
    layout = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if is_tsv else {}
    rows = csv.reader(read_utf8_lines(name, stream), **layout)
    try:
        column = int(field) - 1 if field.isdigit() else None
        for row in rows:
            if column is None:
                column = _find_column(name, row, field)
                continue
            if not row:
                continue
            if not 0 <= column < len(row):
                raise InputError(
                    f"{name}: line {rows.line_num}: '{field}' is column {column + 1}, "
                    f"but the number of columns in this row is {len(row)}"
                )
            yield row[column]
    except csv.Error as error:
        raise InputError(f"{name}: line {rows.line_num}: invalid table: {error}") from None


def _find_column(name: str, header: list[str], field: str) -> int:
    if field not in header:
        raise InputError(f"{name}: column '{field}' not found; available columns: {', '.join(header)[:200]}")
    return header.index(field)
