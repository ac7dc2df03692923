"""The HTTP application: access control, invalid requests, limits and concurrency."""

import gzip
import json
import re
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.testclient import TestClient

from qkv.errors import InputError
from qkv.serving import app as app_module
from qkv.serving.app import RequestExecutor, create_app
from qkv.serving.explorer import Explorer
from qkv.serving.frame_codec import decode_frame
from qkv.serving.model_registry import ModelRegistry
from qkv.serving.server import open_listening_socket
from tests.serving.explorer_client import (
    PORT,
    SECOND,
    TEXT,
    TOKEN,
    explorer,
    new_explorer,
    post_run,
    split_frames,
    tasks,
)
from tests.tasks.small_gpt import save_task
from tests.timeouts import wait_until

HERE = f"http://127.0.0.1:{PORT}"


def client(backend=None, *, token=TOKEN, **settings):
    app = create_app(backend or explorer(), token=TOKEN, port=PORT, **settings)
    headers = {"x-qkv-token": token} if token else {}
    return TestClient(app, base_url=HERE, headers=headers, follow_redirects=False)


def post(path, body, **more):
    return client(**more).post(path, json=body)


def test_the_address_with_the_token_sets_the_cookie_and_redirects():
    browser = client(token="")
    response = browser.get(f"/?token={TOKEN}")
    assert (response.status_code, response.headers["location"]) == (303, "/")
    cookie = response.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    assert browser.get("/api/models").status_code == 200


@pytest.mark.parametrize("path", ["/", "/api/models", "/api/health", "/index.html", "/assets/x.js", "/?token=wrong"])
@pytest.mark.parametrize("token", ["", "wrong", "the-tokem", TOKEN + "x", "ñ"])
def test_requests_without_the_token_are_rejected(path, token):
    headers = {"x-qkv-token": token.encode()} if token else {}
    response = client(token="").get(path, headers=headers)
    assert response.status_code == 401
    assert "token" in response.json()["error"]


@pytest.mark.parametrize(
    "host", ["evil.example", f"evil.example:{PORT}", "127.0.0.1", "127.0.0.1:1", "", "0.0.0.0:8477"]
)
def test_a_foreign_host_is_rejected(host):
    assert client().get("/api/models", headers={"host": host}).status_code == 403


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:8477", "http://127.0.0.1:1"])
def test_a_foreign_origin_is_rejected(origin):
    assert client().get("/api/models", headers={"origin": origin}).status_code == 403
    assert client().get("/api/models", headers={"origin": HERE}).status_code == 200


def test_every_response_has_the_security_headers():
    for response in (client().get("/"), client(token="").get("/"), post("/api/run", {})):
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-store"


BAD = [
    ("/api/run", b"{", 400, "JSON"),
    ("/api/run", b"[]", 400, "list"),
    ("/api/run", b'{"model": "gpt"}', 400, "text"),
    ("/api/run", b'{"model": "gpt", "text": 3}', 400, "text=3"),
    ("/api/run", b'{"model": "gpt", "text": "a", "txet": 1}', 400, "'txet'"),
    ("/api/run", b'{"model": "none", "text": "a"}', 404, "'none'"),
    ("/api/run", b'{"model": "gpt", "text": "\\ud800"}', 400, "surrogate"),
    ("/api/run", b"[" * 200_000, 400, "JSON"),
    ("/api/lens", b'{"run": "old"}', 404, "'old'"),
    ("/api/nothing", b"{}", 405, "/api/nothing"),
    ("/api/models", b"{}", 405, "/api/models"),
    ("/api/cost", b'{"preset": "gpt2", "device": "toaster"}', 400, "toaster"),
    ("/api/cost", b'{"preset": "gpt2", "seq_len": 99999}', 400, "1024"),
    ("/api/models/add", b'{"path": "openai/gpt2"}', 404, "openai/gpt2"),
    ("/api/translate", b'{"model": "seq2seq", "text": "a", "length_penalty": 1e308}', 400, "length_penalty=1e+308"),
]


@pytest.mark.parametrize(("path", "body", "status", "expected"), BAD)
def test_an_invalid_request_has_a_one_line_error(path, body, status, expected):
    response = client().post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == status
    assert expected in response.json()["error"]
    assert "\n" not in response.json()["error"]


def test_get_is_rejected_where_post_is_required():
    assert client().get("/api/run").status_code == 405


def test_a_body_must_be_json_and_small():
    assert client().post("/api/run", content=b"{}").status_code == 415
    large = json.dumps({"model": "gpt", "text": "a" * app_module.MAX_BODY_BYTES})
    response = client().post("/api/run", content=large, headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert "1,048,576" in response.json()["error"]


@pytest.mark.parametrize("family", ["gpt", "bert", "seq2seq", "rnn"])
def test_a_text_beyond_the_context_is_rejected_with_both_lengths(family):
    second = {"second": SECOND} if family in ("seq2seq", "rnn") else {}
    response = post("/api/run", {"model": family, "text": "cat " * 3_000, **second})
    context_length = tasks()[family].model.config.context_length
    assert response.status_code == 400
    assert re.search(rf"\bcontext_length\b.*\b{context_length}\b", response.json()["error"])


@pytest.mark.parametrize("path", ["/api/run", "/api/translate"])
def test_a_source_beyond_the_context_does_not_mention_command_line_flags(path):
    expected = post(path, {"model": "seq2seq", "text": "cat " * 3_000}).json()["error"]
    assert "37" in expected
    assert "--split" not in expected


@pytest.mark.parametrize("family", ["bert", "seq2seq", "rnn"])
def test_an_empty_text_is_rejected(family):
    response = post("/api/run", {"model": family, "text": " \n"})
    assert response.status_code == 400
    assert "0 words" in response.json()["error"]


def test_a_gpt_accepts_an_empty_text():
    response = post("/api/run", {"model": "gpt", "text": ""})
    assert response.json()["sequence"]["labels"] == ["<|endoftext|>"]


@pytest.mark.parametrize(
    "text", ["👩‍👩‍👧 😀", "שלום עולם", "مرحبا", "<img src=x onerror=alert(1)>", "a\u0000b", "é\u0301"]
)
def test_any_script_is_returned_unchanged(text):
    response = post("/api/run", {"model": "gpt", "text": text})
    assert response.status_code == 200
    assert response.json()["text"] == response.json()["sequence"]["text"] == text
    run = response.json()["run"]
    assert post("/api/lens", {"run": run}).status_code == 200
    assert post("/api/map", {"run": run, "merge_words": True}).status_code == 200


def test_large_responses_are_compressed_without_loss():
    run = post_run("gpt")["run"]
    raw = client().post("/api/heads", json={"run": run}, headers={"accept-encoding": "identity"})
    gzip_compress = client().post("/api/heads", json={"run": run}, headers={"accept-encoding": "gzip"})
    assert "content-encoding" not in raw.headers
    assert gzip_compress.headers["content-encoding"] == "gzip"
    assert int(gzip_compress.headers["content-length"]) < len(raw.content)
    assert decode_frame(gzip_compress.content)["labels"] == decode_frame(raw.content)["labels"]
    assert gzip.compress(b"", mtime=0)


def test_a_stream_consists_of_frames():
    response = post("/api/generate", {"model": "gpt", "text": TEXT, "max_new": 5})
    assert response.headers["content-type"] == "application/x-qkv-frames"
    assert [frame["kind"] for frame in split_frames(response.content)] == ["start", *["step"] * 5, "end"]


def test_disconnecting_stops_a_stream():
    backend = new_explorer()
    frames = backend.stream_frames("/api/generate", {"model": "gpt", "text": TEXT, "max_new": 25})
    received = []

    class DisconnectingRequest:
        async def is_disconnected(self):
            return len(received) >= 3

    async def read():
        executor = RequestExecutor()
        async for frame in executor.stream(DisconnectingRequest(), frames, next(frames)):
            received.append(frame)  # noqa: PERF401 - is_disconnected reads the list meanwhile
        return executor.n_pending

    import anyio

    assert anyio.run(read) == 0
    assert len(received) == 3
    assert split_frames(next(frames))[0]["index"] == 2, "steps must not be computed ahead"


def test_concurrent_tabs_do_not_affect_each_other():
    backend = new_explorer()
    expected_predictions = {
        text: post_run("gpt", text, backend=new_explorer())["predictions"] for text in (TEXT, SECOND)
    }
    ablations = [{"kind": "head", "stack": "self", "layer": 0, "head": head} for head in range(5)]

    def tab(number):
        text = (TEXT, SECOND)[number % 2]
        body = {"model": "gpt", "text": text}
        tab_ = client(backend)
        if number % 3 == 0:
            tab_.post("/api/run", json={**body, "interventions": ablations})
        backend.runs._runs.clear()
        return text, tab_.post("/api/run", json=body).json()["predictions"]

    with ThreadPoolExecutor(6) as pool:
        for text, predictions in pool.map(tab, range(24)):
            assert predictions == expected_predictions[text]


def test_too_many_pending_requests_are_rejected():
    backend = new_explorer()
    executor = RequestExecutor(max_pending=1)
    both = TestClient(
        create_app(backend, token=TOKEN, port=PORT, executor=executor), base_url=HERE, headers={"x-qkv-token": TOKEN}
    )
    with backend.registry.find_or_register_checkpoint("gpt").lock, ThreadPoolExecutor(2) as pool, both:
        first = pool.submit(both.post, "/api/run", json={"model": "gpt", "text": TEXT})
        wait_until(lambda: executor.n_pending > 0, "the first request has started")
        second = both.post("/api/run", json={"model": "bert", "text": TEXT})
        assert (second.status_code, "limit 1" in second.json()["error"]) == (429, True)
        backend.registry.find_or_register_checkpoint("gpt").lock.release()
        assert first.result().status_code == 200
        backend.registry.find_or_register_checkpoint("gpt").lock.acquire()
    assert executor.n_pending == 0


def test_a_slow_request_times_out():
    backend = new_explorer()
    executor = RequestExecutor(timeout=0.1)
    with backend.registry.find_or_register_checkpoint("gpt").lock:
        response = client(backend, executor=executor).post("/api/run", json={"model": "gpt", "text": TEXT})
    assert response.status_code == 504
    assert "0.1 seconds" in response.json()["error"]


def test_a_request_that_timed_out_stops_waiting_for_the_model():
    backend, executor = new_explorer(), RequestExecutor(timeout=0.1)
    lock = backend.registry.find_or_register_checkpoint("gpt").lock
    with lock:
        assert (
            client(backend, executor=executor).post("/api/run", json={"model": "gpt", "text": TEXT}).status_code == 504
        )
        wait_until(lambda: not executor.n_pending, "the request stopped waiting for the model")
    assert not backend.runs._runs


def test_health_responds_while_other_requests_wait():
    executor = RequestExecutor(max_pending=0)
    assert client(executor=executor).get("/api/models").status_code == 429
    assert client(executor=executor).get("/api/health").json()["ok"] is True


def test_an_unexpected_exception_has_a_one_line_error(monkeypatch, caplog):
    backend = new_explorer()

    class Panic(BaseException):
        pass

    def broken(_request):
        raise Panic("index 3\nout of range")

    monkeypatch.setattr(backend.runs, "get_or_compute", broken)
    response = client(backend).post("/api/run", json={"model": "gpt", "text": TEXT})
    assert response.status_code == 500
    assert response.json()["error"].endswith("Panic: index 3 out of range")
    assert "Panic" in caplog.text


def test_a_model_that_was_deleted_while_open_is_gone(tmp_path):
    folder = save_task(tasks()["gpt"], tmp_path / "mine")
    backend = Explorer(ModelRegistry([folder], zoo=False))
    body = {"model": str(folder), "text": TEXT}
    run = client(backend).post("/api/run", json=body).json()["run"]
    shutil.rmtree(folder)
    for response in (client(backend).post("/api/run", json=body), client(backend).post("/api/lens", json={"run": run})):
        assert response.status_code == 410
        assert str(folder) in response.json()["error"]


def test_only_files_of_the_page_are_served(tmp_path):
    page = tmp_path / "page"
    (page / "assets").mkdir(parents=True)
    (page / "index.html").write_text("<!doctype html><title>it</title>")
    (page / "assets" / "a.js").write_text("1")
    (tmp_path / "secret").write_text("no")
    (page / "link").symlink_to(tmp_path / "secret")
    backend = client(page_folder=page)
    assert backend.get("/").text.startswith("<!doctype html>")
    assert backend.get("/assets/a.js").headers["content-type"].startswith("text/javascript")
    for path in ("/assets/b.js", "/%2e%2e/secret", "/..%2fsecret", "/link", "/assets", "/%00", "/" + "a" * 5_000):
        assert backend.get(path).status_code == 404
    shutil.rmtree(page)
    assert backend.get("/assets/a.js").text == "1", "files must be read at startup"


def test_a_missing_page_is_replaced_by_a_notice(tmp_path):
    assert "make page" in client(page_folder=tmp_path / "none").get("/").text


def test_a_port_in_use_is_reported_with_a_free_one():
    with (
        open_listening_socket(free := _find_free_port()),
        pytest.raises(InputError, match=rf"port {free} .* --port \d+"),
    ):
        open_listening_socket(free)


def test_an_invalid_port_is_rejected():
    with pytest.raises(InputError, match=r"--port 70000.*65535"):
        open_listening_socket(70_000)


def _find_free_port():
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return trial.getsockname()[1]
