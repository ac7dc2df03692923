"""Requests over a real socket that browsers do not send: foreign hosts, oversized bodies, early disconnects."""

import json
import socket
import threading

import pytest
import uvicorn

from qkv.serving import app as app_module
from qkv.serving.app import create_app
from tests.serving.explorer_client import TEXT, TOKEN, new_explorer
from tests.timeouts import wait_until

FOREIGN = [
    "", "evil.example", "127.0.0.1", "127.0.0.1.", "127.0.0.1:{port}.evil.example", "127.0.0.1:{port}@evil.example",
    "evil.example:{port}", "localhost.evil.example:{port}", "127.1:{port}", "0:{port}", "0.0.0.0:{port}",
    "2130706433:{port}", "0x7f000001:{port}", "[::]:{port}", "[::ffff:127.0.0.1]:{port}", "127.0.0.1:{port}0",
    "127.0.0.1: {port}", "127.0.0.1:{port},evil.example", "LOCALHOST.:{port}", "127.0.0.1:{port}/", "*:{port}",
    "\xff:{port}",
]  # fmt: skip
FOREIGN_ORIGINS = [
    "null", "http://evil.example", "https://127.0.0.1:{port}", "http://127.0.0.1", "http://127.0.0.1:{port}.evil.example",
    "http://127.0.0.1:{port}@evil.example", "file://", "http://localhost:{port}/", "http://http://127.0.0.1:{port}",
    "127.0.0.1:1", "ws://127.0.0.1:{port}", "HTTP://127.0.0.1:{port}", "chrome-extension://abc", "http://0.0.0.0:{port}",
    "http://[::]:{port}", "http://127.0.0.1:{port} http://evil.example",
]  # fmt: skip


@pytest.fixture(scope="module")
def port():
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(64)
    number = listening.getsockname()[1]
    app = create_app(new_explorer(), token=TOKEN, port=number)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    wait_until(lambda: server.started, "the server has started")
    yield number
    server.should_exit = True
    thread.join(60)
    listening.close()


def send_request(
    port: int, *lines: str, body: bytes = b"", method: str = "GET /api/models", host: str | None = None
) -> str:
    """Returns the status of the response, or an empty string if the connection was closed without one."""
    head = [f"{method} HTTP/1.1", f"host: {host if host is not None else f'127.0.0.1:{port}'}", f"x-qkv-token: {TOKEN}"]
    request = "\r\n".join([*head, *lines, "", ""]).encode("latin-1") + body
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        try:
            connection.sendall(request)
            response = connection.recv(4096).decode("latin-1")
        except (ConnectionResetError, BrokenPipeError):
            return ""
    return response.split(" ")[1] if response else ""


def is_healthy(port: int) -> bool:
    return send_request(port, method="GET /api/health") == "200"


@pytest.mark.parametrize("host", FOREIGN)
def test_a_foreign_host_is_rejected(port, host):
    assert send_request(port, host=host.format(port=port)) in ("403", "400")
    assert is_healthy(port)


@pytest.mark.parametrize("origin", FOREIGN_ORIGINS)
def test_a_foreign_origin_is_rejected(port, origin):
    assert send_request(port, f"origin: {origin.format(port=port)}") in ("403", "400")


@pytest.mark.parametrize(
    ("lines", "body", "statuses"),
    [
        (["x-long: " + "a" * 10**6], b"", ("400", "431", "")),
        ([f"x-{i}: a" for i in range(20_000)], b"", ("400", "431", "")),
        (["content-type: application/json", "content-length: 99999999999"], b"{}", ("408",)),
        (["content-type: application/json", "content-length: -1"], b"{}", ("400",)),
        (["content-type: application/json", "content-length: 2", "content-length: 3"], b"{}", ("400",)),
        (["content-type: application/json", "transfer-encoding: chunked"], b"zz\r\n", ("400",)),
        (["content-type: application/json", "content-length: 2000000"], b"[" * 2_000_000, ("413", "")),
        (["content-type: application/json", "content-length: 3"], b"{}", ("408",)),
    ],
)
def test_oversized_and_incomplete_requests_are_ended(port, lines, body, statuses, monkeypatch):
    # The short limit applies only to bodies that never end. Others may take as long as this machine needs.
    monkeypatch.setattr(app_module, "BODY_SECONDS", 0.3 if statuses == ("408",) else 600.0)
    assert send_request(port, *lines, method="POST /api/run", body=body) in statuses
    assert is_healthy(port)


def test_incomplete_requests_do_not_block_others(port):
    waiting = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
    for connection in waiting:
        connection.sendall(b"GET /api/models HTTP/1.1\r\nhost: ")
    assert is_healthy(port)
    for connection in waiting:
        connection.close()
    assert is_healthy(port)


def test_immediate_disconnects_do_not_block_others(port):
    body = json.dumps({"model": "gpt", "text": TEXT, "max_new": 25}).encode()
    head = f"POST /api/generate HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nx-qkv-token: {TOKEN}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
            connection.sendall(head.encode() + body)
    assert is_healthy(port)
    assert send_request(port) == "200"
