"""What goes back, whoever asked."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from qkv.errors import QKVError
from qkv.serving.frame import as_json

JSON, FRAME, FRAMES = "application/json", "application/x-qkv-frame", "application/x-qkv-frames"
T = TypeVar("T")
log = logging.getLogger("qkv.serving")


@dataclass(frozen=True)
class Answer:
    status: int
    type: str
    body: bytes
    filename: str | None = None
    """Of a file to download."""


class RefusedError(QKVError):
    """No answer but one line, with HTTP's number for its kind."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        self.status = status


def refusal(error: QKVError) -> Answer:
    status = error.status if isinstance(error, RefusedError) else 400
    return Answer(status, JSON, as_json({"error": " ".join(str(error).split())}))


def guarded(work: Callable[[], T]) -> T | Answer:
    """What goes wrong is an answer too, or somebody waits for ever; a bug is logged, and told in one line."""
    try:
        return work()
    except QKVError as error:
        return refusal(error)
    except BaseException as error:  # tokenizers' panics are no Exception
        log.exception("a request failed")
        line = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        return Answer(500, JSON, as_json({"error": f"a bug of qkv, please report it: {line}"}))
