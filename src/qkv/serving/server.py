"""The explorer on a port of this machine, until it is stopped."""

import os
import secrets
import socket
import sys
import webbrowser
from collections.abc import Callable
from threading import Timer

import uvicorn

from qkv.errors import InputError
from qkv.serving.responses import Answering
from qkv.serving.app import make_app

HOST, PORT = "127.0.0.1", 8477
GRACE = 3
"""Seconds that requests get to finish when the server is stopped."""


def serve(explorer: Answering, *, port: int = PORT, browser: bool = True, ready: Callable[[str], None]) -> None:
    """`ready` is told the address, which carries the token; it is never sent anywhere else."""
    listening = listen(port)
    token = secrets.token_urlsafe(24)
    app = make_app(explorer, token=token, port=port)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=GRACE,
        limit_concurrency=256,
    )  # fmt: skip
    address = f"http://{HOST}:{port}/?token={token}"
    # With eight threads at work in Python, whoever answers /api/health would wait five times as long for its turn.
    sys.setswitchinterval(0.001)
    ready(address)
    if browser and has_browser():
        Timer(0.5, webbrowser.open, (address,)).start()
    uvicorn.Server(config).run(sockets=[listening])


def listen(port: int) -> socket.socket:
    """The port, taken at once, so that a second server is told before anything is loaded."""
    if not 1 <= port <= 65535:
        raise InputError(f"--port {port}: a port is from 1 to 65535")
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port))
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise InputError(
            f"port {port} cannot be used ({os.strerror(error.errno or 0).lower()}; perhaps another qkv explore runs "
            f"there): try --port {free_port(port)}"
        ) from None
    return listening


def free_port(near: int) -> int:
    """The next one that nobody listens at; any, where the next hundred are taken."""
    for port in [*range(near + 1, min(near + 100, 65536)), 0]:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
            try:
                trial.bind((HOST, port))
            except OSError:
                continue
            return trial.getsockname()[1]
    raise InputError("no port is free on this machine")


def has_browser() -> bool:
    """Not a browser in the terminal, which would take it over."""
    if sys.platform in ("darwin", "win32"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
