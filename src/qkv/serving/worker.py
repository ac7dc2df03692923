"""The explorer in a process of its own: however busy the models are, HTTP is answered.

Of one process a single thread runs Python at a time. Beside models that are at work, the thread that speaks HTTP waited
for its turn up to a second; here it shares its process with nobody who has much to do, and does without torch.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Event, RLock, Thread
from time import sleep
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from qkv.errors import InputError, QKVError
from qkv.serving.responses import Answer, RefusedError, guarded
from qkv.serving.locks import N_THREADS, POLL, for_client, is_given_up

if TYPE_CHECKING:
    from qkv.serving.explorer import Explorer

GRACE = 5.0
"""Seconds for the process to end."""
ARENA_MAX, N_HEAPS = -8, 2
"""`M_ARENA_MAX` of glibc's malloc.h, and what it is set to."""
TRIM_SECONDS = 10.0


class Apart:
    """Is `Answering`: a pipe for each request at work, and one that says which nobody waits for any more."""

    def __init__(self, models: Sequence[str] = ()) -> None:
        """A model that cannot be read is an error here, as it is for a `Shelf`."""
        start = get_context("spawn")
        pipes = [start.Pipe() for _ in range(1 + N_THREADS)]
        (self._control, *ours), (control, *theirs) = zip(*pipes, strict=True)
        self._numbers = count()
        # A stream is given up where it is let go, which may be in the midst of giving up another.
        self._saying = RLock()
        self._lines: SimpleQueue[Connection] = SimpleQueue()
        for line in ours:
            self._lines.put(line)
        self._process = start.Process(target=_work, args=(list(models), control, theirs), daemon=True)
        self._process.start()
        for end in (control, *theirs):
            end.close()  # else nobody would notice that the process has ended
        try:
            hello = self._control.recv()
        except EOFError:
            hello = "the process for the models ended before it had begun"
        except BaseException:
            self.close()
            raise
        if isinstance(hello, str):
            self.close()
            raise InputError(hello)
        self.ways, self._at_once = hello

    def ask(self, path: str, body: dict[str, Any] | None) -> Answer:
        if path in self._at_once and self._process.is_alive():
            return self._at_once[path]
        return guarded(lambda: self._exchange(_Asked(number=next(self._numbers), path=path, body=body)))

    def frames(self, path: str, body: dict[str, Any] | None) -> Iterator[bytes]:
        asked = _Asked(number=next(self._numbers), path=path, body=body, is_stream=True)
        try:
            while (frame := self._exchange(asked)) is not None:
                if isinstance(frame, Answer):
                    raise RefusedError(frame.status, json.loads(frame.body)["error"])
                yield frame
                asked = _Asked(number=asked.number, path=path, is_stream=True)
        finally:
            self._give_up(asked.number)

    def close(self) -> None:
        self._control.close()
        self._process.join(GRACE)
        if self._process.is_alive():
            self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _exchange(self, asked: "_Asked") -> Any:  # noqa: ANN401 - an answer, a frame, or None after the last one
        line = self._lines.get()
        try:
            line.send(asked)
            while True:
                while not line.poll(POLL):
                    if is_given_up():
                        self._give_up(asked.number)
                number, answer = line.recv()
                if number == asked.number:  # else it is the answer to somebody who was interrupted and never read it
                    return answer
        except RecursionError:
            raise RefusedError(400, "the body is nested too deeply") from None
        except (EOFError, OSError):
            raise RefusedError(503, "the process that held the models has ended: start qkv explore again") from None
        except BaseException:
            self._give_up(asked.number)
            raise
        finally:
            self._lines.put(line)

    def _give_up(self, number: int) -> None:
        with self._saying, suppress(OSError):
            self._control.send(number)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What goes through a pipe. Each frame of a stream is asked for by itself; only the first needs the body."""

    number: int
    path: str
    body: dict[str, Any] | None = None
    is_stream: bool = False


@dataclass
class _Worked:
    """What is at work in the other process, by its number."""

    explorer: "Explorer"
    given_up: dict[int, Event] = field(default_factory=dict)
    streams: dict[int, Iterator[bytes]] = field(default_factory=dict)

    def keep_answering(self, line: Connection) -> None:
        with line, suppress(EOFError, OSError):
            while True:
                asked = line.recv()
                self.given_up[asked.number] = event = Event()
                with for_client(event):
                    answer = self._answer(asked)
                # Before it is sent: a stream's next frame has the same number, and may be asked for at once.
                del self.given_up[asked.number]
                line.send((asked.number, answer))

    def give_up(self, number: int) -> None:
        self.streams.pop(number, None)
        if (event := self.given_up.get(number)) is not None:
            event.set()

    def _answer(self, asked: _Asked) -> Answer | bytes | None:
        if not asked.is_stream:
            return self.explorer.ask(asked.path, asked.body)
        stream = self.streams.get(asked.number)
        if stream is None:
            stream = self.streams[asked.number] = self.explorer.frames(asked.path, asked.body)
        return guarded(lambda: next(stream, None))


def _work(models: list[str], control: Connection, lines: Sequence[Connection]) -> None:
    """The other process, until nobody holds the other end of `control`."""
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)  # sent to all at once; who speaks HTTP first lets the requests finish
    _share_heaps()
    from qkv.serving.explorer import Explorer
    from qkv.serving.model_registry import ModelRegistry

    try:
        shelf = ModelRegistry(models)
        for one in shelf.given:
            if (wrong := shelf.describe(one)["error"]) is not None:
                raise InputError(str(wrong))
    except QKVError as error:
        control.send(str(error))
        return
    explorer = Explorer(shelf)
    at_once = {path: explorer.ask(path, None) for path, way in explorer.ways.items() if way.is_quick}
    control.send((explorer.ways, at_once))
    worked = _Worked(explorer)
    for line in lines:
        Thread(target=worked.keep_answering, args=(line,), daemon=True).start()
    with suppress(EOFError, OSError):
        while True:
            worked.give_up(control.recv())
    os._exit(0)  # a pass that has begun is not waited for


def _share_heaps() -> None:
    """glibc gives each thread a heap of its own, and each would grow to the most that its thread ever held."""
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        with suppress(AttributeError):  # other C libraries have no such calls
            library.mallopt(ARENA_MAX, N_HEAPS)
            Thread(target=_keep_trimming, args=(library.malloc_trim,), daemon=True).start()


def _keep_trimming(trim: Callable[[int], int]) -> None:
    """What is free inside the heaps goes back to the system; it takes some milliseconds."""
    while True:
        sleep(TRIM_SECONDS)
        trim(0)
