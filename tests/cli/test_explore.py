"""`qkv explore`: the address is printed, the server answers, and a port in use is reported."""

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from qkv.serving.server import find_next_or_any_free_port, open_listening_socket
from tests.tasks.small_gpt import save_task, small_gpt


def start_server(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "qkv.cli", "explore", "--no-browser", *arguments], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_the_server_answers_until_it_is_stopped(tmp_path):
    folder = save_task(small_gpt(), tmp_path / "mine")
    server = start_server(str(folder), "--port", str(find_next_or_any_free_port(9100)))
    try:
        address = re.fullmatch(r"qkv explorer .*(http://127\.0\.0\.1:\d+/)\?token=(\S+)\n", server.stdout.readline())
        assert address, server.stderr.read()
        request = urllib.request.Request(f"{address[1]}api/models", headers={"X-QKV-Token": address[2]})
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert str(folder).encode() in answer.read()
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{address[1]}api/models", timeout=120)
        server.send_signal(signal.SIGINT)
        assert server.wait(120) == 130
        assert "Traceback" not in server.stderr.read()
    finally:
        server.kill()
        server.communicate()


@pytest.mark.parametrize("argument", ["port", "model"])
def test_an_invalid_argument_is_reported_in_one_line(argument, tmp_path):
    port = find_next_or_any_free_port(9200)
    with open_listening_socket(port):
        arguments = ["--port", str(port)] if argument == "port" else [str(tmp_path / "none"), "--port", str(port + 1)]
        out, err = start_server(*arguments).communicate(timeout=240)
    assert out == ""
    expected = rf"port {port} .*--port \d+" if argument == "port" else str(tmp_path / "none")
    assert re.search(expected, err.strip().splitlines()[-1])
    assert "Traceback" not in err
