"""The contents of a store do not depend on workers and interruptions, and disk errors contain the path."""

import errno
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qkv.choices import SpecialToken
from qkv.data import TokenStore, is_unfinished, prepare_store, read_text_chunks, token_store_writer
from qkv.errors import ConfigError, DiskError, InputError
from qkv.text import MAX_CHUNK_CHARACTERS, Tokenizer, save_tokenizer
from tests.architecture.paths import ROOT
from tests.data.stores import TEXTS, small_store, tokenizer, write_texts

SHARD_TOKENS = 300


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module", autouse=True)
def _small_groups():
    """Make groups small, so that a few texts are split into many groups and several shards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_store_writer, "_GROUP_CHARACTERS", 200)
        yield


@pytest.fixture
def paths(tmp_path):
    return write_texts(tmp_path / "texts")


@pytest.fixture
def expected(tmp_path, paths):
    prepare_store(paths, tmp_path / "expected", tokenizer=tokenizer(), n_workers=1, shard_tokens=SHARD_TOKENS)
    files = read_files(tmp_path / "expected")
    assert sum(name.startswith("tokens") for name in files) > 3
    assert "progress.json" not in files
    return files


@pytest.mark.parametrize("n_workers", [2, 4])
def test_the_store_does_not_depend_on_the_number_of_workers(n_workers, tmp_path, paths, expected):
    prepare_store(paths, tmp_path / "new", tokenizer=tokenizer(), n_workers=n_workers, shard_tokens=SHARD_TOKENS)
    assert read_files(tmp_path / "new") == expected


class Killed(BaseException):
    """Stands for an abrupt end of the process."""


def test_a_preparation_interrupted_at_any_fsync_is_resumed(tmp_path, paths, expected, monkeypatch):
    real_fsync, n_left = os.fsync, 0

    def fsync(handle):
        nonlocal n_left
        n_left -= 1
        if n_left < 0:
            raise Killed
        real_fsync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    for n_syncs in range(1000):
        n_left, folder = n_syncs, tmp_path / f"new-{n_syncs}"
        try:
            prepare_store(paths, folder, tokenizer=tokenizer(), shard_tokens=SHARD_TOKENS)
            break
        except Killed:
            n_left = 1000
            prepare_store(paths, folder, tokenizer=tokenizer(), shard_tokens=SHARD_TOKENS)
            assert read_files(folder) == expected
    assert n_syncs > 20


SCRIPT = """
import os, signal, sys
from qkv.data import token_store_writer, prepare_store
from qkv.text import load_tokenizer
token_store_writer._GROUP_CHARACTERS = 200
left = int(sys.argv[1])
def progress(done, total):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
prepare_store(sys.argv[4:], sys.argv[2], tokenizer=load_tokenizer(sys.argv[3]), shard_tokens=300, progress=progress)
"""


def test_a_preparation_that_is_killed_repeatedly_is_resumed(tmp_path, paths, expected):
    save_tokenizer(tokenizer(), tmp_path / "tokenizer")
    kills = 0
    for after in (4, 5, 4, 1000):
        command = [sys.executable, "-c", SCRIPT, str(after), tmp_path / "new", tmp_path / "tokenizer", *paths]
        result = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
        kills += result.returncode == -signal.SIGKILL
    assert result.returncode == 0, result.stderr
    assert kills == 3
    assert read_files(tmp_path / "new") == expected


def test_finished_shards_are_not_rewritten(tmp_path, paths, monkeypatch):
    def stop(done, total):
        if len(list((tmp_path / "new").glob("tokens-*.bin"))) == 2:
            raise Killed

    with pytest.raises(Killed):
        prepare_store(paths, tmp_path / "new", tokenizer=tokenizer(), shard_tokens=SHARD_TOKENS, progress=stop)
    assert is_unfinished(tmp_path / "new")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "new").glob("tokens-*.bin")}
    prepare_store(paths, tmp_path / "new", tokenizer=tokenizer(), shard_tokens=SHARD_TOKENS)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert not is_unfinished(tmp_path / "new")


def prepare_one_shard(folder, paths):
    def stop(done, total):
        if (folder / "tokens-00000.bin").exists():
            raise Killed

    with pytest.raises(Killed):
        prepare_store(paths, folder, tokenizer=tokenizer(), shard_tokens=SHARD_TOKENS, progress=stop)


def test_an_unfinished_store_cannot_be_resumed_with_different_sources(tmp_path, paths):
    prepare_one_shard(tmp_path / "new", paths)
    with pytest.raises(InputError, match=r"new: .*\bsources, sizes, modified_ns\b"):
        prepare_store(paths[:1], tmp_path / "new", tokenizer=tokenizer(), shard_tokens=SHARD_TOKENS)
    paths[2].write_text("changed meanwhile")
    with pytest.raises(InputError, match=r"new: .* sizes, modified_ns\b"):
        prepare_store(paths, tmp_path / "new", tokenizer=tokenizer(), shard_tokens=SHARD_TOKENS)


def test_a_modified_shard_is_detected_when_resuming(tmp_path, paths):
    prepare_one_shard(tmp_path / "new", paths)
    path = tmp_path / "new" / "tokens-00000.bin"
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    with pytest.raises(InputError, match=r"tokens-00000\.bin: .*hash"):
        prepare_store(paths, tmp_path / "new", tokenizer=tokenizer(), shard_tokens=SHARD_TOKENS)


@pytest.mark.parametrize(("text", "pattern"), [("{", "JSON"), ("{}", "plan "), ("[]", "list")])
def test_the_error_for_an_invalid_progress_file_contains_its_name(text, pattern, tmp_path, paths):
    (tmp_path / "progress.json").write_text(text)
    with pytest.raises(InputError, match=rf"progress\.json: .*{pattern}"):
        prepare_store(paths, tmp_path, tokenizer=tokenizer())


def test_a_folder_that_is_not_empty_is_an_error(tmp_path, paths):
    small_store(tmp_path)
    with pytest.raises(InputError, match=r"store: .*complete"):
        prepare_store(paths, tmp_path / "store", tokenizer=tokenizer())
    with pytest.raises(InputError, match=r"texts: .*a\.txt"):
        prepare_store(paths, tmp_path / "texts", tokenizer=tokenizer())
    with pytest.raises(InputError, match=r"a\.txt: .*folder"):
        prepare_store(paths, tmp_path / "texts" / "a.txt", tokenizer=tokenizer())


def test_progress_increases_to_the_size_of_the_sources(tmp_path):
    calls = []
    small_store(tmp_path, progress=lambda done, total: calls.append((done, total)))
    size = sum(path.stat().st_size for path in (tmp_path / "texts").iterdir())
    assert calls[-1] == (size, size)
    assert calls == sorted(calls)


def test_the_error_for_a_full_disk_contains_the_path_and_bytes(tmp_path, paths, monkeypatch):
    def raise_disk_full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", raise_disk_full)
    with pytest.raises(DiskError, match=r"progress\.json: .*\d+ bytes: No space left on device \(\d+ bytes free\)"):
        prepare_store(paths, tmp_path / "new", tokenizer=tokenizer())


def test_a_disk_that_is_full_while_tokens_are_written_is_an_error(tmp_path, paths, monkeypatch):
    class FullDisk(io.BytesIO):
        def write(self, _):
            raise OSError(errno.ENOSPC, "No space left on device")

    real_open = Path.open
    monkeypatch.setattr(
        Path, "open", lambda path, *a, **k: FullDisk() if path.name.startswith("tokens") else real_open(path, *a, **k)
    )
    with pytest.raises(DiskError, match=r"tokens-00000\.bin: .*[1-9]\d* bytes: No space left"):
        prepare_store(paths, tmp_path / "new", tokenizer=tokenizer())


def test_the_error_for_a_read_only_disk_contains_the_path(tmp_path, paths, monkeypatch):
    def raise_read_only(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", raise_read_only)
    with pytest.raises(DiskError, match=r"new: .*Read-only file system \(\d+ bytes free\)"):
        prepare_store(paths, tmp_path / "new", tokenizer=tokenizer())


def test_a_tokenizer_without_an_end_token_is_an_error(tmp_path, paths):
    without_end = Tokenizer(tokenizer().backend, {SpecialToken.PAD: "<|endoftext|>"})
    with pytest.raises(InputError, match=r"eos_token.*sep_token"):
        prepare_store(paths, tmp_path / "new", tokenizer=without_end)
    with pytest.raises(ConfigError, match=r"shard_tokens .*\b1, got 0$"):
        prepare_store(paths, tmp_path / "new", tokenizer=tokenizer(), shard_tokens=0)


def test_standard_input_has_the_same_tokens_as_files(tmp_path, monkeypatch):
    text = "\n<|endoftext|>\n".join(TEXTS)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    from_stdin = prepare_store(["-"], tmp_path / "stdin", tokenizer=tokenizer())
    from_files = small_store(tmp_path)
    assert np.array_equal(from_stdin.read(0, from_stdin.n_tokens), from_files.read(0, from_files.n_tokens))
    assert from_stdin.index.sources[0].size == len(text.encode())


def test_files_of_only_whitespace_are_an_error(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(" \n ")
    with pytest.raises(InputError, match=r"a\.txt: "):
        prepare_store([tmp_path / "texts"], tmp_path / "new", tokenizer=tokenizer())


def test_the_chunks_of_a_long_line_have_the_tokens_of_the_line(tmp_path):
    line = "the cat sat on the ñandú " * (MAX_CHUNK_CHARACTERS // 16)
    (tmp_path / "a.txt").write_text(line)
    store = prepare_store([tmp_path / "a.txt"], tmp_path / "new", tokenizer=tokenizer(), shard_tokens=10**5)
    assert len(store.index.shards) > 1
    assert store.n_documents == 1
    assert store.document(0).tolist()[:-1] == tokenizer().encode(line.strip())
    assert store.document_bytes().tolist() == [len(line.strip().encode())]


def test_texts_are_read_up_to_a_limit(tmp_path, paths):
    calls = []
    texts = list(read_text_chunks(paths, progress=lambda done, total: calls.append((done, total))))
    assert texts == TEXTS
    size = sum(path.stat().st_size for path in paths)
    assert calls[-1] == (size, size)
    assert list(read_text_chunks(paths, stop_after_characters=len(TEXTS[0]) + 1)) == TEXTS[:2]


def test_ids_of_a_large_vocabulary_are_stored_as_uint32(tmp_path, paths):
    backend = Tokenizer(tokenizer().backend, tokenizer().special_tokens).backend
    backend = type(backend).from_str(backend.to_str())
    backend.add_tokens([f"<{n}>" for n in range(70_000)])
    large = Tokenizer(backend, tokenizer().special_tokens)
    store = prepare_store(paths, tmp_path / "new", tokenizer=large)
    assert store.index.dtype == "uint32"
    assert np.array_equal(store.document(0)[:-1], large.encode(TEXTS[0]))
    assert isinstance(TokenStore.open(tmp_path / "new", verify=True), TokenStore)


def test_a_store_may_contain_a_slice_of_the_documents_of_a_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\n<|endoftext|>\n".join(TEXTS))
    train = prepare_store([f"{path}[:-5]"], tmp_path / "train", tokenizer=tokenizer())
    held_out = prepare_store([f"{path}[-5:]"], tmp_path / "held-out", tokenizer=tokenizer())
    assert (train.n_documents, held_out.n_documents) == (len(TEXTS) - 5, 5)
    assert tokenizer().decode(held_out.document(0).tolist()) == TEXTS[-5]
