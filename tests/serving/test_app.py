"""Over HTTP: who may ask, what is refused, and several at once."""

import gzip
import json
import shutil
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.testclient import TestClient

from qkv.errors import InputError
from qkv.serving import app as served
from qkv.serving.app import Desk, make_app
from qkv.serving.explorer import Explorer
from qkv.serving.frame_codec import unpack
from qkv.serving.server import listen
from qkv.serving.model_registry import ModelRegistry
from tests.serving.explorer_client import PORT, SECOND, TEXT, TOKEN, explorer, frames, new_explorer, run_of, tasks
from tests.tasks.small_gpt import saved
from tests.waiting import wait_until

HERE = f"http://127.0.0.1:{PORT}"


def client(own=None, *, token=TOKEN, **settings):
    app = make_app(own or explorer(), token=TOKEN, port=PORT, **settings)
    headers = {"x-qkv-token": token} if token else {}
    return TestClient(app, base_url=HERE, headers=headers, follow_redirects=False)


def post(path, body, **more):
    return client(**more).post(path, json=body)


def test_the_first_address_gives_the_cookie_and_forgets_the_token():
    browser = client(token="")
    answer = browser.get(f"/?token={TOKEN}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    assert browser.get("/api/models").status_code == 200


@pytest.mark.parametrize("path", ["/", "/api/models", "/api/health", "/index.html", "/assets/x.js", "/?token=wrong"])
@pytest.mark.parametrize("token", ["", "wrong", "the-tokem", TOKEN + "x", "ñ"])
def test_without_the_token_nothing_is_answered(path, token):
    headers = {"x-qkv-token": token.encode()} if token else {}
    answer = client(token="").get(path, headers=headers)
    assert answer.status_code == 401
    assert "token" in answer.json()["error"]


@pytest.mark.parametrize(
    "host", ["evil.example", f"evil.example:{PORT}", "127.0.0.1", "127.0.0.1:1", "", "0.0.0.0:8477"]
)
def test_a_foreign_host_is_refused(host):
    assert client().get("/api/models", headers={"host": host}).status_code == 403


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:8477", "http://127.0.0.1:1"])
def test_a_foreign_origin_is_refused(origin):
    assert client().get("/api/models", headers={"origin": origin}).status_code == 403
    assert client().get("/api/models", headers={"origin": HERE}).status_code == 200


def test_every_answer_carries_the_policy():
    for answer in (client().get("/"), client(token="").get("/"), post("/api/run", {})):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"


BAD = [
    ("/api/run", b"{", 400, "not JSON"),
    ("/api/run", b"[]", 400, "a list, not an object"),
    ("/api/run", b'{"model": "gpt"}', 400, "text is missing"),
    ("/api/run", b'{"model": "gpt", "text": 3}', 400, "text=3"),
    ("/api/run", b'{"model": "gpt", "text": "a", "txet": 1}', 400, "unknown key 'txet'"),
    ("/api/run", b'{"model": "none", "text": "a"}', 404, "'none'"),
    ("/api/run", b'{"model": "gpt", "text": "\\ud800"}', 400, "half a surrogate pair"),
    ("/api/run", b"[" * 200_000, 400, "not JSON"),
    ("/api/lens", b'{"run": "old"}', 404, "post it to /api/run again"),
    ("/api/nothing", b"{}", 405, "method not allowed"),
    ("/api/models", b"{}", 405, "method not allowed"),
    ("/api/cost", b'{"preset": "gpt2", "device": "toaster"}', 400, "toaster"),
    ("/api/cost", b'{"preset": "gpt2", "length": 99999}', 400, "1024"),
    ("/api/models/add", b'{"path": "openai/gpt2"}', 404, "no such folder"),
    ("/api/translate", b'{"model": "seq2seq", "text": "a", "length_penalty": 1e308}', 400, "length_penalty=1e+308"),
]


@pytest.mark.parametrize(("path", "body", "status", "line"), BAD)
def test_a_bad_request_is_one_line(path, body, status, line):
    answer = client().post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert line in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


def test_a_get_of_what_is_posted_is_refused():
    assert client().get("/api/run").status_code == 405


def test_a_body_must_be_json_and_small():
    assert client().post("/api/run", content=b"{}").status_code == 415
    large = json.dumps({"model": "gpt", "text": "a" * served.MOST_BODY})
    answer = client().post("/api/run", content=large, headers={"content-type": "application/json"})
    assert answer.status_code == 413
    assert "1,048,576" in answer.json()["error"]


@pytest.mark.parametrize("family", ["gpt", "bert", "seq2seq", "rnn"])
def test_a_text_over_the_context_is_refused_with_both_numbers(family):
    second = {"second": SECOND} if family in ("seq2seq", "rnn") else {}
    answer = post("/api/run", {"model": family, "text": "cat " * 3_000, **second})
    room = tasks()[family].model.config.context_length
    assert answer.status_code == 400
    assert f"context_length is {room}" in answer.json()["error"]


@pytest.mark.parametrize("path", ["/api/run", "/api/translate"])
def test_a_source_over_the_context_is_told_in_the_pages_words(path):
    line = post(path, {"model": "seq2seq", "text": "cat " * 3_000}).json()["error"]
    assert "context_length is 37" in line
    assert "--split" not in line


@pytest.mark.parametrize("family", ["bert", "seq2seq", "rnn"])
def test_an_empty_text_is_refused(family):
    answer = post("/api/run", {"model": family, "text": " \n"})
    assert answer.status_code == 400
    assert "empty" in answer.json()["error"]


def test_an_empty_text_is_where_a_gpt_begins():
    answer = post("/api/run", {"model": "gpt", "text": ""})
    assert answer.json()["own"]["labels"] == ["<|endoftext|>"]


@pytest.mark.parametrize(
    "text", ["👩‍👩‍👧 😀", "שלום עולם", "مرحبا", "<img src=x onerror=alert(1)>", "a\u0000b", "é\u0301"]
)
def test_any_writing_goes_there_and_back(text):
    answer = post("/api/run", {"model": "gpt", "text": text})
    assert answer.status_code == 200
    assert answer.json()["text"] == answer.json()["own"]["text"] == text
    run = answer.json()["run"]
    assert post("/api/lens", {"run": run}).status_code == 200
    assert post("/api/map", {"run": run, "words": True}).status_code == 200


def test_large_answers_are_zipped_and_the_same():
    run = run_of("gpt")["run"]
    raw = client().post("/api/heads", json={"run": run}, headers={"accept-encoding": "identity"})
    zipped = client().post("/api/heads", json={"run": run}, headers={"accept-encoding": "gzip"})
    assert "content-encoding" not in raw.headers
    assert zipped.headers["content-encoding"] == "gzip"
    assert int(zipped.headers["content-length"]) < len(raw.content)
    assert unpack(zipped.content)["labels"] == unpack(raw.content)["labels"]
    assert gzip.compress(b"", mtime=0)


def test_a_stream_comes_frame_by_frame():
    answer = post("/api/generate", {"model": "gpt", "text": TEXT, "max_new": 5})
    assert answer.headers["content-type"] == "application/x-qkv-frames"
    assert [one["kind"] for one in frames(answer.content)] == ["start", *["step"] * 5, "end"]


def test_a_reader_who_leaves_stops_the_work():
    own = new_explorer()
    made = own.frames("/api/generate", {"model": "gpt", "text": TEXT, "max_new": 25})
    taken = []

    class Left:
        async def is_disconnected(self):
            return len(taken) >= 3

    async def read():
        desk = Desk()
        async for frame in desk.stream(Left(), made, next(made)):
            taken.append(frame)  # noqa: PERF401 - what was taken so far is asked for meanwhile
        return desk.n_busy

    import anyio

    assert anyio.run(read) == 0
    assert len(taken) == 3
    assert frames(next(made))[0]["index"] == 2, "the next step was not made ahead"


def test_two_tabs_ask_at_once_and_each_gets_its_own():
    own = new_explorer()
    alone = {text: run_of("gpt", text, of=new_explorer())["predictions"] for text in (TEXT, SECOND)}
    off = [{"kind": "head", "stack": "self", "layer": 0, "head": head} for head in range(5)]

    def tab(number):
        text = (TEXT, SECOND)[number % 2]
        body = {"model": "gpt", "text": text}
        tab_ = client(own)
        if number % 3 == 0:
            tab_.post("/api/run", json={**body, "interventions": off})
        own.runs._kept.clear()
        return text, tab_.post("/api/run", json=body).json()["predictions"]

    with ThreadPoolExecutor(6) as pool:
        for text, predictions in pool.map(tab, range(24)):
            assert predictions == alone[text]


def test_too_many_at_once_are_told_to_wait():
    own, held = new_explorer(), threading.Event()
    desk = Desk(most=1)
    both = TestClient(make_app(own, token=TOKEN, port=PORT, desk=desk), base_url=HERE, headers={"x-qkv-token": TOKEN})
    with own.shelf.find("gpt").lock, ThreadPoolExecutor(2) as pool, both:
        first = pool.submit(both.post, "/api/run", json={"model": "gpt", "text": TEXT})
        wait_until(lambda: desk.n_busy > 0, "the first is at work")
        second = both.post("/api/run", json={"model": "bert", "text": TEXT})
        held.set()
        assert (second.status_code, "try again" in second.json()["error"]) == (429, True)
        own.shelf.find("gpt").lock.release()
        assert first.result().status_code == 200
        own.shelf.find("gpt").lock.acquire()
    assert desk.n_busy == 0


def test_a_request_that_takes_too_long_is_given_up():
    own = new_explorer()
    desk = Desk(seconds=0.1)
    with own.shelf.find("gpt").lock:
        answer = client(own, desk=desk).post("/api/run", json={"model": "gpt", "text": TEXT})
    assert answer.status_code == 504
    assert "0.1 seconds" in answer.json()["error"]


def test_who_was_given_up_leaves_the_queue_and_never_gets_the_model():
    own, desk = new_explorer(), Desk(seconds=0.1)
    lock = own.shelf.find("gpt").lock
    with lock:
        assert client(own, desk=desk).post("/api/run", json={"model": "gpt", "text": TEXT}).status_code == 504
        wait_until(lambda: not desk.n_busy, "it waits for the model no more")
    assert not own.runs._kept


def test_health_is_answered_however_many_wait():
    desk = Desk(most=0)
    assert client(desk=desk).get("/api/models").status_code == 429
    assert client(desk=desk).get("/api/health").json()["ok"] is True


def test_a_bug_is_one_line_too(monkeypatch, caplog):
    own = new_explorer()

    class Panic(BaseException):
        pass

    def broken(_asked):
        raise Panic("index 3\nout of range")

    monkeypatch.setattr(own.runs, "ask", broken)
    answer = client(own).post("/api/run", json={"model": "gpt", "text": TEXT})
    assert answer.status_code == 500
    assert answer.json()["error"].endswith("Panic: index 3 out of range")
    assert "a request failed" in caplog.text


def test_a_model_that_was_removed_while_open_is_told_of(tmp_path):
    folder = saved(tasks()["gpt"], tmp_path / "mine")
    own = Explorer(ModelRegistry([folder], zoo=False))
    body = {"model": str(folder), "text": TEXT}
    run = client(own).post("/api/run", json=body).json()["run"]
    shutil.rmtree(folder)
    for answer in (client(own).post("/api/run", json=body), client(own).post("/api/lens", json={"run": run})):
        assert answer.status_code == 410
        assert "was removed while it was open" in answer.json()["error"]


def test_the_page_and_its_files_are_served_and_nothing_beside_them(tmp_path):
    page = tmp_path / "page"
    (page / "assets").mkdir(parents=True)
    (page / "index.html").write_text("<!doctype html><title>it</title>")
    (page / "assets" / "a.js").write_text("1")
    (tmp_path / "secret").write_text("no")
    (page / "link").symlink_to(tmp_path / "secret")
    own = client(page=page)
    assert own.get("/").text.startswith("<!doctype html>")
    assert own.get("/assets/a.js").headers["content-type"].startswith("text/javascript")
    for path in ("/assets/b.js", "/%2e%2e/secret", "/..%2fsecret", "/link", "/assets", "/%00", "/" + "a" * 5_000):
        assert own.get(path).status_code == 404
    shutil.rmtree(page)
    assert own.get("/assets/a.js").text == "1", "a page that is built anew was half gone"


def test_a_page_that_is_not_built_says_so(tmp_path):
    assert "not built" in client(page=tmp_path / "none").get("/").text


def test_a_second_server_on_the_same_port_is_told_of_another():
    with listen(free := _free()), pytest.raises(InputError, match=rf"port {free} cannot be used .* try --port \d+"):
        listen(free)


def test_a_port_is_a_port():
    with pytest.raises(InputError, match="from 1 to 65535"):
        listen(70_000)


def _free():
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return trial.getsockname()[1]
