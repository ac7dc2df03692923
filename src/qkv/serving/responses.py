"""What goes back, whoever asked."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from qkv.errors import QKVError

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


@dataclass(frozen=True, kw_only=True)
class Way:
    """How one path is asked and answered."""

    method: str
    type: str
    is_quick: bool
    """Answered at once, however many requests wait for their turn."""


@runtime_checkable
class Answering(Protocol):
    """Whoever has answers: an `Explorer`, here or in a process of its own. Threads may ask side by side."""

    @property
    def ways(self) -> Mapping[str, Way]: ...

    def ask(self, path: str, body: dict[str, Any] | None) -> Answer:
        """The whole answer; an error is one too. Of a stream all frames together."""
        ...

    def frames(self, path: str, body: dict[str, Any] | None) -> Iterator[bytes]:
        """A stream's frames, each after its length; an error before the first is raised, a later one is the last."""
        ...


class RefusedError(QKVError):
    """No answer but one line, with HTTP's number for its kind."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        self.status = status


def refusal(error: QKVError) -> Answer:
    status = error.status if isinstance(error, RefusedError) else 400
    return Answer(status, JSON, _error(" ".join(str(error).split())))


def guarded(work: Callable[[], T]) -> T | Answer:
    """What goes wrong is an answer too, or somebody waits for ever; a bug is logged, and told in one line."""
    try:
        return work()
    except QKVError as error:
        return refusal(error)
    except BaseException as error:  # tokenizers' panics are no Exception
        log.exception("a request failed")
        line = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        return Answer(500, JSON, _error(f"a bug of qkv, please report it: {line}"))


def _error(line: str) -> bytes:
    return json.dumps({"error": line}, ensure_ascii=False).encode()
