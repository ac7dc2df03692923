"""Where the text comes from: files, folders, standard input; plain or compressed; sized and hashed as read."""

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
"""Called with the source bytes done and those there are in all (0: not known)."""
STANDARD_INPUT = "-"
TEXT_SUFFIXES = (".txt", ".md", ".jsonl", ".csv", ".tsv")
_COMPRESSIONS = (".gz", ".xz", ".zst")
_SLICE = re.compile(r"(.+)\[(-?\d+)?:(-?\d+)?\]")


@dataclass(frozen=True)
class TextSource:
    name: str
    """As the caller wrote it; this is what messages say."""
    is_explicit: bool = True
    """False for a file found in a folder: there, an empty one is passed over."""
    document_slice: tuple[int | None, int | None] | None = None
    """Only these of its documents, counted as a Python slice counts: `reviews.txt[:-500]`, all but the last 500."""

    @property
    def path(self) -> str:
        """Without what is said of its documents."""
        return self.name if self.document_slice is None else self.name[: self.name.rindex("[")]

    @property
    def file_type(self) -> str:
        """What the file holds, without its compression: `.jsonl` of `a.jsonl.gz`."""
        path = PurePath(self.path)
        return path.with_suffix("").suffix if path.suffix in _COMPRESSIONS else path.suffix

    @property
    def size(self) -> int:
        """Bytes on disk; 0 for standard input, which does not say."""
        return 0 if self.name == STANDARD_INPUT else Path(self.path).stat().st_size


def find_sources(paths: Sequence[str | Path]) -> list[TextSource]:
    """Every file to read, in order; a folder gives its text files, the folders in it too, sorted by path.

    `FILE[:-500]` and `FILE[-500:]` mean some of a file's documents: so training and validation share one file.
    """
    sources = []
    for path in map(str, paths):
        if path == STANDARD_INPUT or Path(path).is_file():
            sources.append(TextSource(path))
        elif Path(path).is_dir():
            sources.extend(_find_text_files(Path(path)))
        elif (found := _SLICE.fullmatch(path)) and Path(found[1]).is_file():
            start, stop = (int(number) if number else None for number in found.groups()[1:])
            sources.append(TextSource(path, document_slice=(start, stop)))
        else:
            raise InputError(f"{path}: there is no such file or folder")
    if [source.name for source in sources].count(STANDARD_INPUT) > 1:
        raise InputError("standard input (-) can be read only once")
    return sources


def find_single_file(path: str | Path) -> TextSource:
    """A file that is read line by line, where neither a folder nor some of a file's documents can be meant."""
    if Path(path).is_dir():
        raise InputError(f"{path}: is a folder, not a file")
    sources = find_sources([path])
    if sources[0].document_slice is not None:
        raise InputError(f"{path}: this file is read whole; [start:stop] is for texts that are parted into documents")
    return sources[0]


class HashingReader(io.RawIOBase):
    """A file that counts and hashes the bytes that are read from it."""

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

    def finish(self) -> str:
        """Read what a decompressor left unread, so that the hash is the whole file's."""
        while self.read(1 << 20):
            pass
        return self._hash.hexdigest()


@contextmanager
def open_source(source: TextSource) -> Iterator[tuple[HashingReader, io.BufferedIOBase]]:
    """The file as it lies on disk, and its content decompressed. A broken file is an `InputError`."""
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
            f"{source.name}: .zst needs the package zstandard; install it with: pip install 'qkv[formats]'"
        ) from None
    inner = zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True)
    return io.BufferedReader(_ZstandardReader(inner, zstandard.ZstdError), 1 << 20)


class _ZstandardReader(io.RawIOBase):
    """Gives a broken file's error the type that every other reader gives it."""

    def __init__(self, inner: Any, error: type[Exception]) -> None:  # noqa: ANN401 - of a library that may be missing
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
        found = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    except OSError as error:  # gone, or forbidden, while it was read
        raise InputError(f"{folder}: cannot be read: {error.strerror}: {error.filename}") from None
    sources = [TextSource(str(path), is_explicit=False) for path in found]
    texts = [source for source in sources if source.file_type in TEXT_SUFFIXES]
    if not texts:
        raise InputError(f"{folder}: holds no text ({', '.join(TEXT_SUFFIXES)}, or one of these as .gz .xz .zst)")
    return texts
