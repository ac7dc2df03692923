"""Read text from plain and compressed files, folders and standard input."""

import io
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from gzip import GzipFile
from hashlib import blake2b
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from qkv.errors import InputError, MissingExtraError

ProgressCallback = Callable[[int, int], None]
"""Function called with the number of bytes read so far and the total number of bytes (0 if unknown)."""
STANDARD_INPUT = "-"
TEXT_SUFFIXES = (".txt", ".md", ".jsonl", ".csv", ".tsv")
_COMPRESSIONS = (".gz", ".xz", ".zst")
_SLICE = re.compile(r"(.+)\[(-?\d+)?:(-?\d+)?\]")


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
