"""The explorer in another process: the same answers, whoever leaves or dies."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

from qkv.errors import InputError
from qkv.serving.responses import RefusedError
from qkv.serving.worker import Apart, _Asked, _Worked
from qkv.serving.explorer import Explorer
from qkv.serving.model_registry import ModelRegistry
from qkv.serving.locks import N_THREADS, for_client
from tests.serving.explorer_client import TEXT, frames, new_explorer, tasks
from tests.tasks.small_gpt import saved
from tests.waiting import wait_until

STREAM = {"text": TEXT, "max_new": 7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(saved(tasks()["gpt"], tmp_path_factory.mktemp("apart") / "gpt"))


@pytest.fixture(scope="module")
def apart(folder):
    with Apart([folder]) as made:
        yield made


def test_it_answers_as_the_explorer_does(apart, folder):
    own = Explorer(ModelRegistry([folder]))
    assert apart.ways == own.ways
    for path, body in [
        ("/api/health", None), ("/api/models", None), ("/api/taps", {"model": folder}), ("/api/run", {"model": "none"}),
        ("/api/run", {"model": folder, "text": TEXT, "txet": 1}), ("/api/cost", {"model": folder}),
    ]:  # fmt: skip
        assert apart.ask(path, body) == own.ask(path, body)


def test_streams_side_by_side_come_whole(apart, folder):
    def ids(of, seed):
        made = frames(b"".join(of.frames("/api/generate", {"model": folder, "seed": seed, **STREAM})))
        assert (made[0]["kind"], made[-1]["kind"]) == ("start", "end")
        return made[-1]["ids"]

    own = Explorer(ModelRegistry([folder], zoo=False))
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda seed: ids(apart, seed), range(12))) == [ids(own, seed) for seed in range(12)]


def test_a_stream_that_is_refused_says_why(apart):
    with pytest.raises(RefusedError, match="no model is open by the name 'none'"):
        next(apart.frames("/api/generate", {"model": "none", **STREAM}))


def test_a_body_nested_too_deeply_is_refused(apart):
    body = {}
    for _ in range(5_000):
        body = {"a": body}
    assert apart.ask("/api/run", body).status == 400


def test_a_model_that_cannot_be_read_is_told_before_anything_is_served(tmp_path):
    (tmp_path / "config.json").write_text('{"family": "gtp"}')
    with pytest.raises(InputError, match="unknown family 'gtp'"):
        Apart([str(tmp_path)])


def test_a_process_that_was_killed_is_told_of_by_every_answer(folder):
    with Apart([folder]) as own:
        stream = own.frames("/api/generate", {"model": folder, **STREAM})
        next(stream)
        os.kill(own._process.pid, signal.SIGKILL)
        own._process.join()
        for path in ("/api/models", "/api/health"):
            answer = own.ask(path, None)
            assert (answer.status, b"has ended" in answer.body) == (503, True)
        with pytest.raises(RefusedError, match="has ended"):
            next(stream)


def test_the_answer_that_an_interrupted_question_left_unread_goes_to_nobody(apart, folder):
    def poll(_seconds):
        raise KeyboardInterrupt

    lines = [apart._lines.get() for _ in range(N_THREADS)]
    apart._lines.put(SimpleNamespace(send=lines[0].send, poll=poll))
    assert apart.ask("/api/taps", {"model": folder}).status == 500
    apart._lines.get()
    apart._lines.put(lines[0])
    own = Explorer(ModelRegistry([folder]))
    assert apart.ask("/api/cost", {"model": folder}) == own.ask("/api/cost", {"model": folder})
    for line in lines[1:]:
        apart._lines.put(line)


def test_signals_to_all_leave_the_models_to_whoever_speaks_http(apart):
    for one in (signal.SIGINT, signal.SIGTERM):
        os.kill(apart._process.pid, one)
    assert apart.ask("/api/models", None).status == 200


def test_who_speaks_http_does_without_torch():
    script = "import sys, qkv.serving.worker, qkv.serving.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.fixture
def worked():
    """The other side's work, and a line to it, in this process."""
    made, (ours, theirs) = _Worked(new_explorer()), Pipe()
    thread = threading.Thread(target=made.keep_answering, args=(theirs,))
    thread.start()
    yield made, ours
    ours.close()
    thread.join(60)
    assert not thread.is_alive()


def test_who_was_given_up_leaves_the_queue_there_too(worked):
    made, line = worked
    with made.explorer.shelf.find("gpt").lock:
        line.send(_Asked(number=3, path="/api/run", body={"model": "gpt", "text": TEXT}))
        wait_until(lambda: 3 in made.given_up, "the question is at work")
        made.give_up(3)
        number, answer = line.recv()
        assert (number, answer.status) == (3, 499)
    assert not made.given_up


def test_a_stream_that_was_given_up_is_not_kept(worked):
    made, line = worked
    line.send(_Asked(number=5, path="/api/generate", body={"model": "gpt", **STREAM}, is_stream=True))
    assert frames(line.recv()[1])[0]["kind"] == "start"
    assert list(made.streams) == [5]
    made.give_up(5)
    assert not made.streams


def test_nobody_waits_longer_than_its_client(apart, monkeypatch):
    """What is given up here is said to the other side."""
    said, answers = [], iter([False])
    monkeypatch.setattr(apart, "_give_up", said.append)
    event = threading.Event()
    event.set()
    lines = [apart._lines.get() for _ in range(N_THREADS)]
    # The first poll finds no answer, however soon it came.
    line = SimpleNamespace(
        send=lines[0].send, recv=lines[0].recv, poll=lambda seconds: next(answers, lines[0].poll(seconds))
    )
    apart._lines.put(line)
    with for_client(event):
        apart.ask("/api/cost", {"preset": "gpt2"})
    apart._lines.get()
    for line in lines:
        apart._lines.put(line)
    assert said
