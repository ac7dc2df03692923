"""The explorer over HTTP: limits, threads, streams, and the page's own files."""

import asyncio
import json
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock
from time import monotonic
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp

from qkv.errors import QKVError
from qkv.serving.responses import FRAME, FRAMES, JSON, Answer, Answering, RefusedError, guarded, refusal
from qkv.serving.access_control import Guard, refused
from qkv.serving.standalone_page import PAGE, index
from qkv.serving.locks import N_THREADS, POLL, for_client
from qkv.serving.frame_format import counted, frame_of

MOST_BODY = 2**20
MOST_AT_ONCE = 32
SECONDS, STREAM_SECONDS = 120.0, 600.0
BODY_SECONDS = 20.0
"""For the body to arrive: who sends it byte by byte is not waited for."""
LEAST_ZIPPED = 1024
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
"""Of the page's files. On some systems `mimetypes` calls a script plain text, and browsers then refuse it."""

T = TypeVar("T")


@dataclass
class Desk:
    """Where work is done: threads, how much waits for them, and how long it may take."""

    most: int = MOST_AT_ONCE
    seconds: float = SECONDS
    stream_seconds: float = STREAM_SECONDS
    n_busy: int = 0
    counting: Lock = field(default_factory=Lock)
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(N_THREADS, "qkv"))

    async def do(self, request: Request, work: Callable[[], T]) -> T:
        """The answer of a thread; nobody waits for one whose client has left or whose time is over."""
        self._enter()
        given_up = Event()

        def in_turn() -> T:
            with for_client(given_up):
                return work()

        future = self.pool.submit(in_turn)
        # Counted until it really ends: what was given up still keeps its thread busy.
        future.add_done_callback(lambda _: self._leave())
        waiting = asyncio.wrap_future(future)
        end = monotonic() + self.seconds
        while not (await asyncio.wait({waiting}, timeout=POLL))[0]:
            if monotonic() > end:
                given_up.set()
                future.cancel()
                raise RefusedError(504, f"no answer after {self.seconds:g} seconds, the most a request may take")
            if await request.is_disconnected():
                given_up.set()
                future.cancel()
                raise RefusedError(499, "the client has left")
        return waiting.result()

    async def stream(self, request: Request, frames: Iterator[bytes], first: bytes) -> AsyncIterator[bytes]:
        """The rest of a stream, one frame at a time; a client that leaves is noticed before the next."""
        loop = asyncio.get_running_loop()
        end = monotonic() + self.stream_seconds
        with self.counting:
            self.n_busy += 1
        try:
            yield first
            while not await request.is_disconnected():
                if monotonic() > end:
                    yield _last(f"stopped after {self.stream_seconds:g} seconds")
                    return
                frame = await loop.run_in_executor(self.pool, guarded, lambda: next(frames, None))
                if frame is None:
                    return
                if isinstance(frame, Answer):
                    yield _last(json.loads(frame.body)["error"])
                    return
                yield frame
        finally:
            self._leave()

    def _enter(self) -> None:
        with self.counting:
            if self.n_busy >= self.most:
                line = f"{self.n_busy} requests are at work or waiting, the most there may be: try again"
                raise RefusedError(429, line)
            self.n_busy += 1

    def _leave(self) -> None:
        with self.counting:
            self.n_busy -= 1


def make_app(
    explorer: Answering, *, token: str, port: int, page: Path | None = None, desk: Desk | None = None
) -> ASGIApp:
    """`page`: another folder than the package's own; `desk`: other limits."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    counter, files, ways = desk or Desk(), _files(page or PAGE), explorer.ways

    async def ask(request: Request) -> Response:
        try:
            body = None if request.method == "GET" else await read_body(request)
            path = request.url.path
            if ways[path].is_quick:
                return _response(explorer.ask(path, body))
            if ways[path].type == FRAMES:
                frames = explorer.frames(path, body)
                first = await counter.do(request, lambda: guarded(lambda: next(frames)))
                if isinstance(first, Answer):
                    return _response(first)
                return StreamingResponse(counter.stream(request, frames, first), media_type=FRAMES)
            zips = "gzip" in request.headers.get("accept-encoding", "")
            return await counter.do(request, lambda: _response(explorer.ask(path, body), zips=zips))
        except QKVError as error:
            return _response(refusal(error))

    for path, way in ways.items():
        app.add_api_route(path, ask, methods=[way.method])

    @app.get("/{path:path}")
    async def file(path: str) -> Response:
        if f"/{path}" in ways:
            return refused(405, f"/{path} is asked by POST")
        return _response(files[path]) if path in files else refused(404, f"there is no /{path}")

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        line = f"{request.method} {request.url.path}: {error.detail.lower()}"
        return refused(error.status_code, line)

    return Guard(app, token=token, port=port)


def _last(line: str) -> bytes:
    return counted(frame_of({"kind": "error", "error": line}))


async def read_body(request: Request) -> dict[str, Any]:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise RefusedError(415, f"the body must be {JSON}")
    parts, n = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                n += len(part)
                if n > MOST_BODY:
                    raise RefusedError(413, f"the body has more than {MOST_BODY:,} bytes")
                parts.append(part)
    except TimeoutError:
        raise RefusedError(408, f"after {BODY_SECONDS:g} seconds {n:,} bytes of the body have come") from None
    except ClientDisconnect:
        raise RefusedError(499, "the client has left") from None
    try:
        body = json.loads(b"".join(parts))
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RefusedError(400, f"the body is a {type(body).__name__}, not an object")
    return body


def _response(answer: Answer, *, zips: bool = False) -> Response:
    headers = {}
    body = answer.body
    if zips and len(body) >= LEAST_ZIPPED:
        body = zipped(body, is_text=answer.type != FRAME)
        headers["content-encoding"] = "gzip"
        headers["vary"] = "accept-encoding"
    if answer.filename is not None:
        headers["content-disposition"] = f'attachment; filename="{answer.filename}"'
    return Response(body, answer.status, headers, answer.type)


def zipped(body: bytes, *, is_text: bool) -> bytes:
    """Weights do not come again as words do: runs alone are looked for, four times as fast and shorter too."""
    made = zlib.compressobj(4, wbits=31, strategy=zlib.Z_DEFAULT_STRATEGY if is_text else zlib.Z_RLE)
    return made.compress(body) + made.flush()


def _files(page: Path) -> dict[str, Answer]:
    """The page's files by their path. Read once: a page that is built anew meanwhile is never seen in part."""
    files = [one for one in page.rglob("*") if one.suffix in TYPES and one.is_file() and not one.is_symlink()]
    found = {one.relative_to(page).as_posix(): Answer(200, TYPES[one.suffix], one.read_bytes()) for one in files}
    shown = Answer(200, TYPES[".html"], index(page).encode())
    return {**found, "": shown, "index.html": shown}
