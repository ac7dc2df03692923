"""Read documents from text files, JSON Lines files and tables.

A document is a text file, a section of it between <|endoftext|> lines, a JSON line or a table row. JSON and table lines
are read into memory as a whole. Other long documents are read in chunks, which are split at points that do not affect
their tokens (see `qkv.text.tokenizer`). Whitespace around documents is removed and empty documents are skipped.
"""

import codecs
import csv
import json
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedIOBase
from itertools import chain, islice
from pathlib import Path

from qkv.data.text_sources import ProgressCallback, TextSource, open_raw_and_decompressed, parse_text_sources
from qkv.errors import InputError
from qkv.text import END_OF_TEXT, MAX_CHUNK_CHARACTERS, split_into_chunks
from qkv.text.tokenizer import find_last_split_point_or_stop

_BLOCK_BYTES = 1 << 20
_SEPARATOR = re.compile(rf"^[^\S\n]*{re.escape(END_OF_TEXT)}[^\S\n]*$", re.MULTILINE)


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
