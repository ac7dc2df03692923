"""Run the explorer's HTTP server on the loopback address."""

import os
import secrets
import socket
import sys
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

import uvicorn

from qkv.errors import InputError
from qkv.serving.app import create_app
from qkv.serving.responses import Backend

HOST, PORT = "127.0.0.1", 8477
GRACEFUL_SHUTDOWN_SECONDS = 3
"""Time in seconds that active requests have to finish when the server is stopped."""


def serve(backend: Backend, *, port: int = PORT, browser: bool = True, ready: Callable[[str], None]) -> None:
    """Serve the explorer until the process is interrupted.

    `ready` is called with the address once the port is open. The address contains the access token.
    """
    listener = open_listening_socket(port)
    token = secrets.token_urlsafe(24)
    app = create_app(backend, token=token, port=port)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_SECONDS,
        limit_concurrency=256,
    )
    address = f"http://{HOST}:{port}/?token={token}"
    with _short_switch_interval():
        ready(address)
        if browser and has_graphical_browser():
            Timer(0.5, webbrowser.open, (address,)).start()
        uvicorn.Server(config).run(sockets=[listener])


@contextmanager
def _short_switch_interval() -> Iterator[None]:
    """Let Python switch between threads every millisecond.

    With eight threads running Python code, the default interval of 5 ms would delay /api/health five times as long.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.001)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def open_listening_socket(port: int) -> socket.socket:
    """Return a socket that listens on the port, or raise `InputError` if the port is invalid or in use."""
    if not 1 <= port <= 65535:
        raise InputError(f"--port {port}: must be between 1 and 65535")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise InputError(
            f"port {port} cannot be used ({os.strerror(error.errno or 0).lower()}). Another `qkv explore` may be using "
            f"this port; try --port {find_next_or_any_free_port(port)}"
        ) from None
    return listener


def find_next_or_any_free_port(base_port: int) -> int:
    """Return the next free port after `base_port`, or any free port if the next hundred ports are in use."""
    for port in [*range(base_port + 1, min(base_port + 100, 65536)), 0]:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
            try:
                trial.bind((HOST, port))
            except OSError:
                continue
            return trial.getsockname()[1]
    raise InputError("no free port is available on this machine")


def has_graphical_browser() -> bool:
    """Return whether a graphical browser can be opened. A terminal browser would take over the terminal."""
    if sys.platform in ("darwin", "win32"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
