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
    """The status, content type and body of an API response."""

    status: int
    content_type: str
    body: bytes
    filename: str | None = None
    """File name under which the browser saves the response, or `None` if the response is not a download."""


@dataclass(frozen=True, kw_only=True)
class RouteSettings:
    """The HTTP method and content type of an API path."""

    method: str
    content_type: str
    skips_queue: bool
    """Whether requests to this path are handled immediately, regardless of how many other requests are waiting."""


@runtime_checkable
class Backend(Protocol):
    """A thread-safe handler of API requests.

    The handler is an `Explorer`, or a `WorkerClient` for an `Explorer` in another process.
    """

    @property
    def route_settings(self) -> Mapping[str, RouteSettings]: ...

    def handle_request(self, path: str, body: dict[str, Any] | None) -> APIResponse:
        """Return the complete response to a request.

        An error is returned as a response. A stream is returned as a single body with all frames.
        """
        ...

    def stream_frames(self, path: str, body: dict[str, Any] | None) -> Iterator[bytes]:
        """Yield the frames of the response to a request, each with a length prefix.

        An error before the first frame is raised, whereas a later error becomes the last frame.
        """
        ...


class RequestError(QKVError):
    """A request that failed, with an HTTP status and a one-line message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def error_response(error: QKVError) -> APIResponse:
    """Convert an error to a JSON response. The status is 400 unless the error is a `RequestError`."""
    status = error.status if isinstance(error, RequestError) else 400
    return APIResponse(status, JSON, _encode_error(" ".join(str(error).split())))


def catch_errors(work: Callable[[], _Result]) -> _Result | APIResponse:
    """Call a function and convert any exception to an error response so that no client waits forever.

    Unexpected exceptions are logged and reported to the client in one line with status 500.
    """
    try:
        return work()
    except QKVError as error:
        return error_response(error)
    except BaseException as error:  # PanicException, which tokenizers raises, is not a subclass of Exception
        log.exception("request failed")
        message = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        return APIResponse(500, JSON, _encode_error(f"internal error in qkv, please report it: {message}"))


def _encode_error(message: str) -> bytes:
    return json.dumps({"error": message}, ensure_ascii=False).encode()
