"""Download of models by name, from a local imitation of the hub."""

import json
import sys
import threading
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from qkv.errors import InputError, MissingExtraError
from qkv.tasks import load_pretrained
from qkv.weights.hub import download_safetensors_snapshot
from qkv.weights.save import save_hf
from tests.weights.loaded_models import assert_same_weights, random_model

pytest.importorskip("huggingface_hub", reason="the extra `hub` is not installed")

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(BaseHTTPRequestHandler):
    """Minimal imitation of the hub that serves the file list of a model and its files."""

    files: dict[str, bytes]
    requested: list[str]

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, *, body):
        self.requested.append(self.path)
        path = self.path.partition("?")[0]
        name = path.partition("/resolve/")[2].partition("/")[2]
        if not path.removeprefix("/api/models").startswith("/org/model"):
            self.reply(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"}, body=body)
        elif path.startswith("/api/"):
            siblings = [{"rfilename": file} for file in self.files]
            about = {"_id": "1", "id": "org/model", "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
            if "/tree/" in path:
                sizes = {file: len(data) for file, data in self.files.items()}
                about = [{"type": "file", "path": file, "size": size, "oid": "0" * 40} for file, size in sizes.items()]
            self.reply(200, json.dumps(about).encode(), {}, body=body)
        else:
            data = self.files[name]
            tag = {"ETag": f'"{sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            self.reply(200, data, tag, body=body)

    def reply(self, status, data, headers, *, body):
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    save_hf(random_model("gpt2"), tmp_path / "model")
    FakeHub.files = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    FakeHub.files |= {"pytorch_model.bin": b"a pickle", "run_me.py": b"print('no')", "onnx/model.safetensors": b"other"}
    FakeHub.requested = []
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield FakeHub
        server.shutdown()


def test_executable_files_are_not_downloaded(hub, tmp_path):
    folder = download_safetensors_snapshot("org/model", cache=tmp_path / "cache")
    assert {file.name for file in folder.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert not [path for path in hub.requested if "pytorch_model" in path or "run_me" in path or "onnx" in path]
    assert_same_weights(load_pretrained(folder), random_model("gpt2"))


def test_the_pooling_of_a_sentence_model_is_downloaded(hub, tmp_path):
    hub.files |= {"modules.json": b"[]", "1_Pooling/config.json": b"{}"}
    folder = download_safetensors_snapshot("org/model", cache=tmp_path / "cache")
    assert (folder / "modules.json").read_bytes() == b"[]"
    assert (folder / "1_Pooling" / "config.json").read_bytes() == b"{}"


def test_an_unknown_name_is_reported_in_one_line(hub, tmp_path):
    with pytest.raises(InputError, match=r"^org/nothing: [^\n]+$"):
        download_safetensors_snapshot("org/nothing", cache=tmp_path / "cache")


def test_a_missing_network_is_reported_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(InputError, match=r"^org/model: [^\n]+$"):
        download_safetensors_snapshot("org/model", cache=tmp_path / "cache")


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"^org/model: .*qkv\[hub\]"):
        download_safetensors_snapshot("org/model")
