"""Documents out of files: one a file, one a separator, one a JSON line, one a table row.

Nothing is ever held whole but a JSON or table line: a long document comes in parts, cut where no token changes
(see `qkv.text.chunks`). White space at a document's ends is not part of it; documents without text are passed over.
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

from qkv.data.text_sources import ProgressCallback, TextSource, find_sources, open_source
from qkv.errors import InputError
from qkv.text import END_OF_TEXT, MAX_CHUNK_CHARACTERS, split_into_chunks
from qkv.text.chunks import find_split_point

_BLOCK_BYTES = 1 << 20
_SEPARATOR = re.compile(rf"^[^\S\n]*{re.escape(END_OF_TEXT)}[^\S\n]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class DocumentChunk:
    """A document, or a part of a long one; joined without anything between, the parts are the document."""

    text: str
    is_last: bool
    """Whether the document ends here."""


def read_documents(paths: Sequence[str | Path], *, field: str = "text") -> Iterator[str]:
    """Every document whole, for texts known to be of sensible length; `read_chunks` for all others."""
    for source in find_sources(paths):
        with open_source(source) as (_, stream):
            chunks: list[str] = []
            for chunk in read_chunks(source, stream, field=field):
                chunks.append(chunk.text)
                if chunk.is_last:
                    yield "".join(chunks)
                    chunks = []


def read_texts(
    paths: Sequence[str | Path],
    *,
    field: str = "text",
    max_characters: int | None = None,
    progress: ProgressCallback | None = None,
) -> Iterator[str]:
    """Parts of documents for those who do not ask where one ends, such as a tokenizer's training.

    Stops after about `max_characters`. `progress` gets the source bytes read and those there are in all.
    """
    sources = find_sources(paths)
    total, done, n_characters = sum(source.size for source in sources), 0, 0
    for source in sources:
        with open_source(source) as (opened, stream):
            for chunk in read_chunks(source, stream, field=field):
                yield chunk.text
                n_characters += len(chunk.text)
                if progress is not None:
                    progress(done + opened.n_bytes, total)
                if max_characters is not None and n_characters >= max_characters:
                    return
            done += opened.n_bytes


def read_chunks(source: TextSource, stream: BufferedIOBase, *, field: str = "text") -> Iterator[DocumentChunk]:
    """By the file's ending. `field` is the key of a .jsonl line, or a table's column.

    A column is named as the first row names it, or counted from 1 where the table has no such row.
    A .csv may quote; in a .tsv a quotation mark is a character like any other.
    """
    empty = True
    chunks = _read_by_file_type(source, stream, field)
    for chunk in chunks if source.document_slice is None else _slice_documents(chunks, *source.document_slice):
        empty = False
        yield chunk
    if empty and source.is_explicit:
        raise InputError(f"{source.name}: is empty: it holds no text")


def _read_by_file_type(source: TextSource, stream: BufferedIOBase, field: str) -> Iterator[DocumentChunk]:
    match source.file_type:
        case ".jsonl":
            texts = _read_json_texts(source.name, stream, field)
        case ".csv" | ".tsv":
            texts = _read_table_texts(source.name, stream, field, tabs=source.file_type == ".tsv")
        case _:
            return _split_plain_text(_read_text_blocks(source.name, stream))
    return (chunk for text in texts for chunk in _split_document(text))


def _slice_documents(chunks: Iterator[DocumentChunk], start: int | None, stop: int | None) -> Iterator[DocumentChunk]:
    """The parts of documents[start:stop]. What counts from the end holds so many documents in memory."""
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


def _split_document(document: str) -> Iterator[DocumentChunk]:
    document = document.strip()
    if document:
        *firsts, last = split_into_chunks(document)
        for first in firsts:
            yield DocumentChunk(first, is_last=False)
        yield DocumentChunk(last, is_last=True)


def _split_plain_text(blocks: Iterator[str]) -> Iterator[DocumentChunk]:
    """A document a separator line; a long one leaves in parts before its end is seen."""
    buffer, has_started = "", False
    for block in blocks:
        buffer += block
        complete = buffer.rfind("\n") + 1  # the last line may still become a separator, or cease to be one
        start = 0
        for separator in _SEPARATOR.finditer(buffer, 0, complete):
            if separator.start() == 0 and has_started:
                continue  # this is the middle of a line that was cut
            yield from _finish_document(buffer[start : separator.start()], has_started=has_started)
            start, has_started = separator.end(), False
        buffer = buffer[start:] if has_started else buffer[start:].lstrip()
        while len(buffer.rstrip()) > MAX_CHUNK_CHARACTERS:
            end = find_split_point(buffer, start=0, stop=MAX_CHUNK_CHARACTERS)
            yield DocumentChunk(buffer[:end], is_last=False)
            buffer, has_started = buffer[end:], True
    start = 0
    for separator in _SEPARATOR.finditer(buffer):
        if not (separator.start() == 0 and has_started):
            yield from _finish_document(buffer[start : separator.start()], has_started=has_started)
            start, has_started = separator.end(), False
    yield from _finish_document(buffer[start:], has_started=has_started)


def _finish_document(text: str, *, has_started: bool) -> Iterator[DocumentChunk]:
    """The end of a document whose beginning has left already, or all of it."""
    if not has_started:
        yield from _split_document(text)
        return
    *firsts, last = split_into_chunks(text.rstrip())
    for first in firsts:
        yield DocumentChunk(first, is_last=False)
    yield DocumentChunk(last, is_last=True)


def _read_text_blocks(name: str, stream: BufferedIOBase) -> Iterator[str]:
    """Text in blocks of one size, whatever the decompressor gives at a time."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    offset, line = 0, 1
    while True:
        data = _read_block(stream)
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


def _read_block(stream: BufferedIOBase) -> bytes:
    blocks: list[bytes] = []
    missing = _BLOCK_BYTES
    while missing and (data := stream.read(missing)):
        blocks.append(data)
        missing -= len(data)
    return b"".join(blocks)


def read_lines(name: str, stream: BufferedIOBase) -> Iterator[str]:
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
        raise InputError(f"{name}: byte {offset + nul} is NUL: this is a binary file, not text")


def _utf8_error(name: str, error: UnicodeDecodeError, *, offset: int, line: int) -> InputError:
    byte = error.object[error.start]
    return InputError(f"{name}: line {line}: byte {offset + error.start} (0x{byte:02X}) is not UTF-8")


def _read_json_texts(name: str, stream: BufferedIOBase, field: str) -> Iterator[str]:
    for number, line in enumerate(read_lines(name, stream), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{name}: line {number}: not valid JSON: {error}") from None
        if not isinstance(record, dict):
            raise InputError(f"{name}: line {number}: holds a {type(record).__name__}, not an object")
        if field not in record:
            known = ", ".join(map(str, record)) or "none"
            raise InputError(f"{name}: line {number}: has no field '{field}' (it has: {known[:200]})")
        text = record[field]
        if not isinstance(text, str):
            raise InputError(f"{name}: line {number}: field '{field}' is a {type(text).__name__}, not text")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError(f"{name}: line {number}: field '{field}' holds half a surrogate pair") from None
        yield text


def _read_table_texts(name: str, stream: BufferedIOBase, field: str, *, tabs: bool) -> Iterator[str]:
    csv.field_size_limit(2**31 - 1)  # the module's own limit, 128 KB, is far below a document
    layout = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tabs else {}
    rows = csv.reader(read_lines(name, stream), **layout)
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
                    f"{name}: line {rows.line_num}: has {len(row)} columns, and column '{field}' is {column + 1}"
                )
            yield row[column]
    except csv.Error as error:
        raise InputError(f"{name}: line {rows.line_num}: not a table: {error}") from None


def _find_column(name: str, header: list[str], field: str) -> int:
    if field not in header:
        raise InputError(f"{name}: has no column '{field}' (it has: {', '.join(header)[:200]})")
    return header.index(field)
