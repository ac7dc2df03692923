"""Where Rust ends and Python begins: whatever `tokenizers` throws leaves as one line."""

from collections.abc import Iterator
from contextlib import contextmanager

from qkv.errors import InputError, QKVError


@contextmanager
def border(doing: str) -> Iterator[None]:
    """`doing` opens the line, such as the name of the file that is read."""
    try:
        yield
    except (QKVError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:  # noqa: BLE001 - a Rust panic is a BaseException, no Exception
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{doing}: {reason[:300]}") from None
