"""API responses and errors, independent of HTTP."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from qkv.errors import QKVError

JSON, FRAME, FRAMES = "application/json", "application/x-qkv-frame", "application/x-qkv-frames"
_Result = TypeVar("_Result")
log = logging.getLogger("qkv.serving")


@dataclass(frozen=True)
class APIResponse:
    """Status, content type and body of a response."""

    status: int
    content_type: str
    body: bytes
    filename: str | None = None
    """File name of a download, or `None` for a response that is not downloaded."""


@dataclass(frozen=True, kw_only=True)
class RouteSettings:
    """HTTP method and content type of an API path."""

    method: str
    content_type: str
    skips_queue: bool
    """Whether requests are handled immediately, regardless of how many other requests are waiting."""


@runtime_checkable
class Backend(Protocol):
    """Handles API requests: an `Explorer`, or a `WorkerClient` for one in another process. Must be thread-safe."""

    @property
    def route_settings(self) -> Mapping[str, RouteSettings]: ...

    def handle_request(self, path: str, body: dict[str, Any] | None) -> APIResponse:
        """Returns the complete response. Errors are returned as responses, and streams as all frames concatenated."""
        ...

    def stream_frames(self, path: str, body: dict[str, Any] | None) -> Iterator[bytes]:
        """Yields length-prefixed frames.

        An error before the first frame is raised. A later error becomes the last frame.
        """
        ...


class RequestError(QKVError):
    """A request that failed, with an HTTP status and a one-line message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def error_response(error: QKVError) -> APIResponse:
    """Returns the error as a JSON response. Errors other than `RequestError` have status 400."""
    status = error.status if isinstance(error, RequestError) else 400
    return APIResponse(status, JSON, _encode_error(" ".join(str(error).split())))


def catch_errors(work: Callable[[], _Result]) -> _Result | APIResponse:
    """Call a function and convert any exception to an error response, so that no client waits forever.

    Unexpected exceptions are logged and reported in one line with status 500.
    """
    try:
        return work()
    except QKVError as error:
        return error_response(error)
    except BaseException as error:  # the PanicException of tokenizers is not an Exception
        log.exception("request failed")
        message = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        return APIResponse(500, JSON, _encode_error(f"internal error in qkv, please report it: {message}"))


def _encode_error(message: str) -> bytes:
    return json.dumps({"error": message}, ensure_ascii=False).encode()
