"""ASGI application of the explorer with its routes, request limits, streaming and static files."""

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
from qkv.serving.access_control import SecurityMiddleware, json_error_response
from qkv.serving.frame_format import add_length_prefix, build_frame
from qkv.serving.locks import N_WORKER_THREADS, POLL_SECONDS, cancellation_scope
from qkv.serving.responses import FRAME, FRAMES, JSON, APIResponse, Backend, RequestError, catch_errors, error_response
from qkv.serving.standalone_page import PAGE_FOLDER, index_html_or_notice

MAX_BODY_BYTES = 2**20
MAX_PENDING_REQUESTS = 32
REQUEST_SECONDS, STREAM_SECONDS = 120.0, 600.0
BODY_SECONDS = 20.0
"""Time limit for receiving a request body, which prevents slow clients from blocking the server."""
MIN_GZIP_BYTES = 1024
MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
"""Media types of the page's files, which are fixed because some systems report text/plain for .js files, and browsers
reject scripts that are served with that type."""

_WorkResult = TypeVar("_WorkResult")


@dataclass
class RequestExecutor:
    """A thread pool that limits the number of pending requests and their duration."""

    max_pending: int = MAX_PENDING_REQUESTS
    timeout: float = REQUEST_SECONDS
    stream_timeout: float = STREAM_SECONDS
    n_pending: int = 0
    pending_lock: Lock = field(default_factory=Lock)
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(N_WORKER_THREADS, "qkv"))

    async def run(self, request: Request, work: Callable[[], _WorkResult]) -> _WorkResult:
        """Run a function in the thread pool and cancel it on a timeout or when the client disconnects."""
        self._increment_pending_or_raise()
        cancel_event = Event()

        def run_cancellable() -> _WorkResult:
            with cancellation_scope(cancel_event):
                return work()

        future = self.pool.submit(run_cancellable)
        # The request counts as pending until its function returns because cancelled work still occupies its thread.
        future.add_done_callback(lambda _: self._remove_pending())
        waiting = asyncio.wrap_future(future)
        end = monotonic() + self.timeout
        while not (await asyncio.wait({waiting}, timeout=POLL_SECONDS))[0]:
            if monotonic() > end:
                cancel_event.set()
                future.cancel()
                raise RequestError(504, f"the request took longer than the limit of {self.timeout:g} seconds")
            if await request.is_disconnected():
                cancel_event.set()
                future.cancel()
                raise RequestError(499, "the client disconnected")
        return waiting.result()

    async def stream(self, request: Request, frames_after_first: Iterator[bytes], first: bytes) -> AsyncIterator[bytes]:
        """Yield the frames of a stream after checking, before each frame, that the client is still connected."""
        loop = asyncio.get_running_loop()
        end = monotonic() + self.stream_timeout
        with self.pending_lock:
            self.n_pending += 1
        try:
            yield first
            while not await request.is_disconnected():
                if monotonic() > end:
                    yield _error_frame(f"the stream was stopped after the limit of {self.stream_timeout:g} seconds")
                    return
                frame = await loop.run_in_executor(self.pool, catch_errors, lambda: next(frames_after_first, None))
                if frame is None:
                    return
                if isinstance(frame, APIResponse):
                    yield _error_frame(json.loads(frame.body)["error"])
                    return
                yield frame
        finally:
            self._remove_pending()

    def _increment_pending_or_raise(self) -> None:
        with self.pending_lock:
            if self.n_pending >= self.max_pending:
                message = f"too many pending requests: {self.n_pending}, limit {self.max_pending}; try again later"
                raise RequestError(429, message)
            self.n_pending += 1

    def _remove_pending(self) -> None:
        with self.pending_lock:
            self.n_pending -= 1


def create_app(
    backend: Backend, *, token: str, port: int, page_folder: Path | None = None, executor: RequestExecutor | None = None
) -> ASGIApp:
    """Create the ASGI application.

    If given, `page_folder` replaces the default page, and `executor` replaces the default limits.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    runner, files, route_settings = (
        executor or RequestExecutor(),
        _load_page_files(page_folder or PAGE_FOLDER),
        backend.route_settings,
    )

    async def handle_api_request(request: Request) -> Response:
        try:
            body = None if request.method == "GET" else await read_json_body(request)
            path = request.url.path
            if route_settings[path].skips_queue:
                return _to_http_response(backend.handle_request(path, body))
            if route_settings[path].content_type == FRAMES:
                frames = backend.stream_frames(path, body)
                first = await runner.run(request, lambda: catch_errors(lambda: next(frames)))
                if isinstance(first, APIResponse):
                    return _to_http_response(first)
                return StreamingResponse(runner.stream(request, frames, first), media_type=FRAMES)
            use_gzip = "gzip" in request.headers.get("accept-encoding", "")
            return await runner.run(
                request, lambda: _to_http_response(backend.handle_request(path, body), use_gzip=use_gzip)
            )
        except QKVError as error:
            return _to_http_response(error_response(error))

    for path, route in route_settings.items():
        app.add_api_route(path, handle_api_request, methods=[route.method])

    @app.get("/{path:path}")
    async def serve_file(path: str) -> Response:
        if f"/{path}" in route_settings:
            return json_error_response(405, f"/{path} requires POST")
        return _to_http_response(files[path]) if path in files else json_error_response(404, f"/{path}: not found")

    @app.exception_handler(HTTPException)
    async def handle_http_exception(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail.lower()}"
        return json_error_response(error.status_code, message)

    return SecurityMiddleware(app, token=token, port=port)


def _error_frame(message: str) -> bytes:
    return add_length_prefix(build_frame({"kind": "error", "error": message}))


async def read_json_body(request: Request) -> dict[str, Any]:
    """Read the request body as a JSON object. Raise `RequestError` if the body is too large, too slow or invalid."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise RequestError(415, f"the content type of the body must be {JSON}")
    parts, n = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                n += len(part)
                if n > MAX_BODY_BYTES:
                    raise RequestError(413, f"the body must have at most {MAX_BODY_BYTES:,} bytes")
                parts.append(part)
    except TimeoutError:
        raise RequestError(
            408, f"the body was not received within {BODY_SECONDS:g} seconds, got only {n:,} bytes"
        ) from None
    except ClientDisconnect:
        raise RequestError(499, "the client disconnected") from None
    try:
        body = json.loads(b"".join(parts))
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body must be valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError(400, f"the body must be a JSON object, got {type(body).__name__}")
    return body


def _to_http_response(response: APIResponse, *, use_gzip: bool = False) -> Response:
    headers = {}
    body = response.body
    if use_gzip and len(body) >= MIN_GZIP_BYTES:
        body = gzip_compress(body, is_text=response.content_type != FRAME)
        headers["content-encoding"] = "gzip"
        headers["vary"] = "accept-encoding"
    if response.filename is not None:
        headers["content-disposition"] = f'attachment; filename="{response.filename}"'
    return Response(body, response.status, headers, response.content_type)


def gzip_compress(body: bytes, *, is_text: bool) -> bytes:
    """Compress a response body with gzip.

    Attention weights contain no repeated strings, so searching them only for runs of equal bytes is four times as fast
    and gives a smaller result.
    """
    compressor = zlib.compressobj(4, wbits=31, strategy=zlib.Z_DEFAULT_STRATEGY if is_text else zlib.Z_RLE)
    return compressor.compress(body) + compressor.flush()


def _load_page_files(page_folder: Path) -> dict[str, APIResponse]:
    """Read the page's files into a dictionary keyed by path.

    The files are read only once so that rebuilding the page does not affect a running server.
    """
    paths = [
        path
        for path in page_folder.rglob("*")
        if path.suffix in MEDIA_TYPES and path.is_file() and not path.is_symlink()
    ]
    files = {
        path.relative_to(page_folder).as_posix(): APIResponse(200, MEDIA_TYPES[path.suffix], path.read_bytes())
        for path in paths
    }
    index = APIResponse(200, MEDIA_TYPES[".html"], index_html_or_notice(page_folder).encode())
    return {**files, "": index, "index.html": index}
