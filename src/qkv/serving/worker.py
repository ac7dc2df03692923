"""Run the explorer in a separate worker process so that the HTTP server stays responsive while models are busy.

Only one thread of a process can run Python code at a time. If the models ran in the HTTP process, the HTTP thread would
wait up to a second for the interpreter lock. The HTTP process does not import torch.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Event, RLock, Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from qkv.errors import InputError, QKVError
from qkv.serving.locks import N_WORKER_THREADS, POLL_SECONDS, cancellation_scope, is_cancelled
from qkv.serving.responses import APIResponse, RequestError, catch_errors

if TYPE_CHECKING:
    from qkv.serving.explorer import Explorer

SHUTDOWN_SECONDS = 5.0
"""Time that `close` waits before it kills the worker."""
M_ARENA_MAX, N_MALLOC_ARENAS = -8, 2
"""The number of glibc's `mallopt` parameter `M_ARENA_MAX`, and the value to which the parameter is set."""
TRIM_SECONDS = 10.0
"""Interval at which the worker returns unused heap memory to the operating system."""


class WorkerClient:
    """A `Backend` that forwards requests to an `Explorer` in a worker process.

    The client uses one pipe for each concurrent request and a control pipe for cancellations.
    """

    def __init__(self, models: Sequence[str] = ()) -> None:
        """Start the worker, or raise `InputError` if a model cannot be read."""
        context = get_context("spawn")
        pipes = [context.Pipe() for _ in range(1 + N_WORKER_THREADS)]
        (self._control, *connections), (control, *worker_connections) = zip(*pipes, strict=True)
        self._request_numbers = count()
        # Reentrant because garbage collection can close a stream, which cancels it, during another cancellation.
        self._control_lock = RLock()
        self._connections: SimpleQueue[Connection] = SimpleQueue()
        for connection in connections:
            self._connections.put(connection)
        self._process = context.Process(
            target=_run_worker, args=(list(models), control, worker_connections), daemon=True
        )
        self._process.start()
        for connection in (control, *worker_connections):
            connection.close()  # otherwise, this process would not detect that the worker has exited
        try:
            greeting = self._control.recv()
        except EOFError:
            greeting = "the worker process exited before it was ready"
        except BaseException:
            self.close()
            raise
        if isinstance(greeting, str):
            self.close()
            raise InputError(greeting)
        self.route_settings, self._static_responses = greeting

    def handle_request(self, path: str, body: dict[str, Any] | None) -> APIResponse:
        if path in self._static_responses and self._process.is_alive():
            return self._static_responses[path]
        return catch_errors(
            lambda: self._send_and_await_response(
                _WorkerRequest(number=next(self._request_numbers), path=path, body=body)
            )
        )

    def stream_frames(self, path: str, body: dict[str, Any] | None) -> Iterator[bytes]:
        request = _WorkerRequest(number=next(self._request_numbers), path=path, body=body, is_stream=True)
        try:
            while (frame := self._send_and_await_response(request)) is not None:
                if isinstance(frame, APIResponse):
                    raise RequestError(frame.status, json.loads(frame.body)["error"])
                yield frame
                request = _WorkerRequest(number=request.number, path=path, is_stream=True)
        finally:
            self._cancel(request.number)

    def close(self) -> None:
        self._control.close()
        self._process.join(SHUTDOWN_SECONDS)
        if self._process.is_alive():
            self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send_and_await_response(self, request: "_WorkerRequest") -> Any:  # noqa: ANN401 - a response, a frame, or None after the last frame
        connection = self._connections.get()
        try:
            connection.send(request)
            while True:
                while not connection.poll(POLL_SECONDS):
                    if is_cancelled():
                        self._cancel(request.number)
                number, response = connection.recv()
                # Other numbers belong to earlier requests that were interrupted before they read their responses.
                if number == request.number:
                    return response
        except RecursionError:
            raise RequestError(400, "the JSON of the request body is nested too deeply") from None
        except (EOFError, OSError):
            raise RequestError(503, "the worker process has exited; restart `qkv explore`") from None
        except BaseException:
            self._cancel(request.number)
            raise
        finally:
            self._connections.put(connection)

    def _cancel(self, request_number: int) -> None:
        with self._control_lock, suppress(OSError):
            self._control.send(request_number)


@dataclass(frozen=True, kw_only=True)
class _WorkerRequest:
    """A message to the worker.

    Each frame of a stream is requested separately, and only the first of these requests needs the body.
    """

    number: int
    path: str
    body: dict[str, Any] | None = None
    is_stream: bool = False


@dataclass
class _WorkerRequestHandler:
    """A handler for the worker's requests, with the active requests and open streams keyed by request number."""

    explorer: "Explorer"
    cancel_events: dict[int, Event] = field(default_factory=dict)
    streams: dict[int, Iterator[bytes]] = field(default_factory=dict)

    def serve_connection(self, connection: Connection) -> None:
        """Handle the requests on a connection until it is closed."""
        with connection, suppress(EOFError, OSError):
            while True:
                request = connection.recv()
                self.cancel_events[request.number] = event = Event()
                with cancellation_scope(event):
                    response = self._respond_or_next_frame(request)
                # Delete the entry before sending because the client may immediately request the next frame with the
                # same number.
                del self.cancel_events[request.number]
                connection.send((request.number, response))

    def cancel(self, request_number: int) -> None:
        self.streams.pop(request_number, None)
        if (event := self.cancel_events.get(request_number)) is not None:
            event.set()

    def _respond_or_next_frame(self, request: _WorkerRequest) -> APIResponse | bytes | None:
        if not request.is_stream:
            return self.explorer.handle_request(request.path, request.body)
        stream = self.streams.get(request.number)
        if stream is None:
            stream = self.streams[request.number] = self.explorer.stream_frames(request.path, request.body)
        return catch_errors(lambda: next(stream, None))


def _run_worker(models: list[str], control: Connection, connections: Sequence[Connection]) -> None:
    """Run the worker process until the client closes its end of the `control` pipe."""
    for stop in (signal.SIGINT, signal.SIGTERM):
        # Ctrl-C signals both processes. The HTTP process handles the signal and first lets active requests finish.
        signal.signal(stop, signal.SIG_IGN)
    with _bounded_heap():
        from qkv.serving.explorer import Explorer
        from qkv.serving.model_registry import ModelRegistry

        try:
            registry = ModelRegistry(models)
            for loaded in registry.user_models:
                if (error := registry.summarize_or_error(loaded)["error"]) is not None:
                    raise InputError(str(error))
        except QKVError as error:
            control.send(str(error))
            return
        explorer = Explorer(registry)
        static_responses = {
            path: explorer.handle_request(path, None)
            for path, route in explorer.route_settings.items()
            if route.skips_queue
        }
        control.send((explorer.route_settings, static_responses))
        state = _WorkerRequestHandler(explorer)
        for connection in connections:
            Thread(target=state.serve_connection, args=(connection,), daemon=True).start()
        with suppress(EOFError, OSError):
            while True:
                state.cancel(control.recv())
        os._exit(0)  # do not wait for a forward pass that is still running


@contextmanager
def _bounded_heap() -> Iterator[None]:
    """Limit glibc to a few heaps, and regularly return unused memory to the operating system.

    By default, each thread has its own heap, which stays at its peak size.
    """
    stopped = Event()
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        with suppress(AttributeError):  # other C libraries do not have these functions
            library.mallopt(M_ARENA_MAX, N_MALLOC_ARENAS)
            Thread(target=_trim_heap_periodically, args=(library.malloc_trim, stopped), daemon=True).start()
    try:
        yield
    finally:
        stopped.set()


def _trim_heap_periodically(trim: Callable[[int], int], stopped: Event) -> None:
    """Return free heap memory to the operating system at regular intervals. Each call takes a few milliseconds."""
    while not stopped.wait(TRIM_SECONDS):
        trim(0)
