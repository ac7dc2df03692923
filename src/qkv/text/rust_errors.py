"""Where Rust ends and Python begins: whatever `tokenizers` throws leaves as one line."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from qkv.errors import InputError, QKVError


@contextmanager
def convert_rust_errors(context: str) -> Iterator[None]:
    """`context` opens the line, such as the name of the file that is read."""
    try:
        yield
    except (QKVError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:  # noqa: BLE001 - a Rust panic is a BaseException, no Exception
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{context}: {reason[:300]}") from None


@contextmanager
def suppress_stderr() -> Iterator[None]:
    """Rust tells of a panic on standard error before anyone can catch it; what is raised says it in one line."""
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # nobody listens there
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def parse_json(text: str) -> Any:  # noqa: ANN401 - whatever the text holds, checked by the callers
    """JSON whose every text can be written in UTF-8: half of a surrogate pair would fail wherever it is used first."""
    tree = json.loads(text)
    if "\\ud" in text or "\\uD" in text:
        json.dumps(tree, ensure_ascii=False).encode()
    return tree
