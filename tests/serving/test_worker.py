"""The worker process returns the same responses as a local explorer, also after cancellations and crashes."""

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
from qkv.serving.explorer import Explorer
from qkv.serving.locks import N_WORKER_THREADS, cancellation_scope
from qkv.serving.model_registry import ModelRegistry
from qkv.serving.responses import RequestError
from qkv.serving.worker import WorkerClient, _WorkerRequest, _WorkerRequestHandler
from tests.serving.explorer_client import TEXT, new_explorer, split_frames, tasks
from tests.tasks.small_gpt import save_task
from tests.timeouts import wait_until

STREAM = {"text": TEXT, "max_new": 7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_task(tasks()["gpt"], tmp_path_factory.mktemp("worker") / "gpt"))


@pytest.fixture(scope="module")
def worker(folder):
    with WorkerClient([folder]) as client:
        yield client


def test_responses_equal_those_of_a_local_explorer(worker, folder):
    local = Explorer(ModelRegistry([folder]))
    assert worker.route_settings == local.route_settings
    for path, body in [
        ("/api/health", None), ("/api/models", None), ("/api/taps", {"model": folder}), ("/api/run", {"model": "none"}),
        ("/api/run", {"model": folder, "text": TEXT, "txet": 1}), ("/api/cost", {"model": folder}),
    ]:  # fmt: skip
        assert worker.handle_request(path, body) == local.handle_request(path, body)


def test_concurrent_streams_are_complete(worker, folder):
    def ids(backend, seed):
        frames = split_frames(
            b"".join(backend.stream_frames("/api/generate", {"model": folder, "seed": seed, **STREAM}))
        )
        assert (frames[0]["kind"], frames[-1]["kind"]) == ("start", "end")
        return frames[-1]["ids"]

    local = Explorer(ModelRegistry([folder], zoo=False))
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda seed: ids(worker, seed), range(12))) == [ids(local, seed) for seed in range(12)]


def test_a_stream_that_cannot_start_raises_the_error(worker):
    with pytest.raises(RequestError, match="'none'"):
        next(worker.stream_frames("/api/generate", {"model": "none", **STREAM}))


def test_a_deeply_nested_body_is_rejected(worker):
    body = {}
    for _ in range(5_000):
        body = {"a": body}
    assert worker.handle_request("/api/run", body).status == 400


def test_a_model_that_cannot_be_read_fails_at_startup(tmp_path):
    (tmp_path / "config.json").write_text('{"family": "gtp"}')
    with pytest.raises(InputError, match=r"family.*'gtp'"):
        WorkerClient([str(tmp_path)])


def test_every_request_fails_after_the_worker_was_killed(folder):
    with WorkerClient([folder]) as local:
        stream = local.stream_frames("/api/generate", {"model": folder, **STREAM})
        next(stream)
        os.kill(local._process.pid, signal.SIGKILL)
        local._process.join()
        for path in ("/api/models", "/api/health"):
            response = local.handle_request(path, None)
            assert response.status == 503
        with pytest.raises(RequestError) as error:
            next(stream)
        assert error.value.status == 503


def test_the_unread_response_of_an_interrupted_request_is_discarded(worker, folder):
    def poll(_seconds):
        raise KeyboardInterrupt

    connections = [worker._connections.get() for _ in range(N_WORKER_THREADS)]
    worker._connections.put(SimpleNamespace(send=connections[0].send, poll=poll))
    assert worker.handle_request("/api/taps", {"model": folder}).status == 500
    worker._connections.get()
    worker._connections.put(connections[0])
    local = Explorer(ModelRegistry([folder]))
    assert worker.handle_request("/api/cost", {"model": folder}) == local.handle_request("/api/cost", {"model": folder})
    for connection in connections[1:]:
        worker._connections.put(connection)


def test_the_worker_ignores_signals(worker):
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker._process.pid, number)
    assert worker.handle_request("/api/models", None).status == 200


def test_the_http_process_does_not_import_torch():
    script = "import sys, qkv.serving.worker, qkv.serving.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.fixture
def connected_state():
    """The state of a worker that serves a pipe in this process, and the client's end of the pipe."""
    state, (client_end, worker_end) = _WorkerRequestHandler(new_explorer()), Pipe()
    thread = threading.Thread(target=state.serve_connection, args=(worker_end,))
    thread.start()
    yield state, client_end
    client_end.close()
    thread.join(60)
    assert not thread.is_alive()


def test_a_cancelled_request_stops_waiting_for_the_model(connected_state):
    state, connection = connected_state
    with state.explorer.registry.find_or_register_checkpoint("gpt").lock:
        connection.send(_WorkerRequest(number=3, path="/api/run", body={"model": "gpt", "text": TEXT}))
        wait_until(lambda: 3 in state.cancel_events, "the request has started")
        state.cancel(3)
        number, response = connection.recv()
        assert (number, response.status) == (3, 499)
    assert not state.cancel_events


def test_a_cancelled_stream_is_closed(connected_state):
    state, connection = connected_state
    connection.send(_WorkerRequest(number=5, path="/api/generate", body={"model": "gpt", **STREAM}, is_stream=True))
    assert split_frames(connection.recv()[1])[0]["kind"] == "start"
    assert list(state.streams) == [5]
    state.cancel(5)
    assert not state.streams


def test_a_cancelled_request_is_cancelled_in_the_worker(worker, monkeypatch):
    cancelled, answers = [], iter([False])
    monkeypatch.setattr(worker, "_cancel", cancelled.append)
    event = threading.Event()
    event.set()
    connections = [worker._connections.get() for _ in range(N_WORKER_THREADS)]
    # The first poll reports that no response is available, even if it has already arrived.
    connection = SimpleNamespace(
        send=connections[0].send,
        recv=connections[0].recv,
        poll=lambda seconds: next(answers, connections[0].poll(seconds)),
    )
    worker._connections.put(connection)
    with cancellation_scope(event):
        worker.handle_request("/api/cost", {"preset": "gpt2"})
    worker._connections.get()
    for connection in connections:
        worker._connections.put(connection)
    assert cancelled
