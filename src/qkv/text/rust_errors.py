"""Handle errors raised by the Rust library `tokenizers`."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from qkv.errors import InputError, QKVError


@contextmanager
def convert_errors_to_input_error(context: str) -> Iterator[None]:
    """Convert exceptions from `tokenizers`, including Rust panics, to an `InputError` that starts with `context`."""
    try:
        yield
    except (QKVError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:  # noqa: BLE001 - a Rust panic is a BaseException, not an Exception
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{context}: {reason[:300]}") from None


@contextmanager
def suppress_stderr() -> Iterator[None]:
    """Redirect file descriptor 2 to /dev/null.

    Rust prints panics to standard error before Python can catch them. The converted exception contains the message
    instead.
    """
    sys.stderr.flush()
    try:
        original = os.dup(2)
    except OSError:  # standard error is closed
        yield
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(original, 2)
        os.close(original)
        os.close(null)


def parse_encodable_json(text: str) -> Any:  # noqa: ANN401 - any JSON value, checked by the callers
    """Parse JSON and check that all strings can be encoded as UTF-8.

    Unpaired surrogates (written as escapes) would otherwise fail later, wherever the string is first used.
    """
    value = json.loads(text)
    if "\\ud" in text or "\\uD" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value
