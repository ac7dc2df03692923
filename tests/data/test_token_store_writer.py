"""The store's bytes are the same whatever the workers and the kills; a refusing disk is named."""

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
from qkv.data import TokenStore, is_unfinished, prepare_store, read_texts
from qkv.data import token_store_writer as preparing
from qkv.errors import ConfigError, DiskError, InputError
from qkv.text import MAX_CHUNK_CHARACTERS, Tokenizer, save_tokenizer
from tests.architecture.paths import ROOT
from tests.data.stores import TEXTS, small_store, tokenizer, write_texts

SHARD = 300


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module", autouse=True)
def _small_groups():
    """So that a few stories make many groups and several shards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "_GROUP_CHARACTERS", 200)
        yield


@pytest.fixture
def paths(tmp_path):
    return write_texts(tmp_path / "texts")


@pytest.fixture
def expected(tmp_path, paths):
    prepare_store(paths, tmp_path / "expected", tokenizer=tokenizer(), n_workers=1, shard_tokens=SHARD)
    whole = content(tmp_path / "expected")
    assert sum(name.startswith("tokens") for name in whole) > 3
    assert "progress.json" not in whole
    return whole


@pytest.mark.parametrize("n_workers", [2, 4])
def test_the_bytes_are_the_same_on_any_number_of_workers(n_workers, tmp_path, paths, expected):
    prepare_store(paths, tmp_path / "new", tokenizer=tokenizer(), n_workers=n_workers, shard_tokens=SHARD)
    assert content(tmp_path / "new") == expected


class Killed(BaseException):
    pass


def test_stopped_at_any_sync_it_goes_on_to_the_same_bytes(tmp_path, paths, expected, monkeypatch):
    real, left = os.fsync, 0

    def fsync(handle):
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    for n_syncs in range(1000):
        left, folder = n_syncs, tmp_path / f"new-{n_syncs}"
        try:
            prepare_store(paths, folder, tokenizer=tokenizer(), shard_tokens=SHARD)
            break
        except Killed:
            left = 1000
            prepare_store(paths, folder, tokenizer=tokenizer(), shard_tokens=SHARD)
            assert content(folder) == expected
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


def test_killed_again_and_again_it_ends_with_the_same_bytes(tmp_path, paths, expected):
    save_tokenizer(tokenizer(), tmp_path / "tokenizer")
    kills = 0
    for after in (4, 5, 4, 1000):
        command = [sys.executable, "-c", SCRIPT, str(after), tmp_path / "new", tmp_path / "tokenizer", *paths]
        answer = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
        kills += answer.returncode == -signal.SIGKILL
    assert answer.returncode == 0, answer.stderr
    assert kills == 3
    assert content(tmp_path / "new") == expected


def test_finished_shards_are_not_made_again(tmp_path, paths, monkeypatch):
    def stop(done, total):
        if len(list((tmp_path / "new").glob("tokens-*.bin"))) == 2:
            raise Killed

    with pytest.raises(Killed):
        prepare_store(paths, tmp_path / "new", tokenizer=tokenizer(), shard_tokens=SHARD, progress=stop)
    assert is_unfinished(tmp_path / "new")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "new").glob("tokens-*.bin")}
    prepare_store(paths, tmp_path / "new", tokenizer=tokenizer(), shard_tokens=SHARD)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert not is_unfinished(tmp_path / "new")


def half_done(folder, paths):
    def stop(done, total):
        if (folder / "tokens-00000.bin").exists():
            raise Killed

    with pytest.raises(Killed):
        prepare_store(paths, folder, tokenizer=tokenizer(), shard_tokens=SHARD, progress=stop)


def test_other_sources_are_not_mixed_into_an_unfinished_store(tmp_path, paths):
    half_done(tmp_path / "new", paths)
    with pytest.raises(InputError, match="cannot be continued: other sources, sizes, modified_ns; name a new folder"):
        prepare_store(paths[:1], tmp_path / "new", tokenizer=tokenizer(), shard_tokens=SHARD)
    paths[2].write_text("modified_ns meanwhile")
    with pytest.raises(InputError, match="cannot be continued: other sizes, modified_ns; name"):
        prepare_store(paths, tmp_path / "new", tokenizer=tokenizer(), shard_tokens=SHARD)


def test_a_damaged_finished_shard_is_noticed_when_going_on(tmp_path, paths):
    half_done(tmp_path / "new", paths)
    path = tmp_path / "new" / "tokens-00000.bin"
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    with pytest.raises(InputError, match=r"tokens-00000\.bin: was changed"):
        prepare_store(paths, tmp_path / "new", tokenizer=tokenizer(), shard_tokens=SHARD)


@pytest.mark.parametrize(("text", "line"), [("{", "not valid JSON"), ("{}", "plan is missing"), ("[]", "a list")])
def test_a_broken_progress_file_is_named(text, line, tmp_path, paths):
    (tmp_path / "progress.json").write_text(text)
    with pytest.raises(InputError, match=f"progress.json: .*{line}"):
        prepare_store(paths, tmp_path, tokenizer=tokenizer())


def test_a_folder_in_use_is_refused(tmp_path, paths):
    small_store(tmp_path)
    with pytest.raises(InputError, match="already holds a finished store"):
        prepare_store(paths, tmp_path / "store", tokenizer=tokenizer())
    with pytest.raises(InputError, match=r"is not empty \(it holds a\.txt\)"):
        prepare_store(paths, tmp_path / "texts", tokenizer=tokenizer())
    with pytest.raises(InputError, match=r"a\.txt: is a file, not a folder"):
        prepare_store(paths, tmp_path / "texts" / "a.txt", tokenizer=tokenizer())


def test_progress_ends_at_the_sources_size(tmp_path):
    calls = []
    small_store(tmp_path, progress=lambda done, total: calls.append((done, total)))
    size = sum(path.stat().st_size for path in (tmp_path / "texts").iterdir())
    assert calls[-1] == (size, size)
    assert calls == sorted(calls)


def test_a_full_disk_names_path_and_bytes(tmp_path, paths, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    line = r"progress\.json: cannot write \d+ bytes: No space left on device \(\d+ bytes free\)"
    with pytest.raises(DiskError, match=line):
        prepare_store(paths, tmp_path / "new", tokenizer=tokenizer())


def test_a_disk_that_fills_up_while_tokens_are_written(tmp_path, paths, monkeypatch):
    class Full(io.BytesIO):
        def write(self, _):
            raise OSError(errno.ENOSPC, "No space left on device")

    real = Path.open
    monkeypatch.setattr(
        Path, "open", lambda path, *a, **k: Full() if path.name.startswith("tokens") else real(path, *a, **k)
    )
    with pytest.raises(DiskError, match=r"tokens-00000\.bin: cannot write [1-9]\d* bytes: No space left"):
        prepare_store(paths, tmp_path / "new", tokenizer=tokenizer())


def test_a_read_only_disk_is_named(tmp_path, paths, monkeypatch):
    def read_only(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(DiskError, match=r"new: cannot be written: Read-only file system \(\d+ bytes free\)"):
        prepare_store(paths, tmp_path / "new", tokenizer=tokenizer())


def test_a_tokenizer_without_an_end_is_refused(tmp_path, paths):
    bare = Tokenizer(tokenizer().backend, {SpecialToken.PAD: "<|endoftext|>"})
    with pytest.raises(InputError, match="neither eos_token nor sep_token"):
        prepare_store(paths, tmp_path / "new", tokenizer=bare)
    with pytest.raises(ConfigError, match="shard_tokens=0 must be at least 1"):
        prepare_store(paths, tmp_path / "new", tokenizer=tokenizer(), shard_tokens=0)


def test_standard_input_makes_the_same_tokens(tmp_path, monkeypatch):
    text = "\n<|endoftext|>\n".join(TEXTS)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    piped = prepare_store(["-"], tmp_path / "piped", tokenizer=tokenizer())
    whole = small_store(tmp_path)
    assert np.array_equal(piped.read(0, piped.n_tokens), whole.read(0, whole.n_tokens))
    assert piped.index.sources[0].size == len(text.encode())


def test_a_text_of_blanks_alone_is_refused(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(" \n ")
    with pytest.raises(InputError, match="hold no text"):
        prepare_store([tmp_path / "texts"], tmp_path / "new", tokenizer=tokenizer())


def test_one_long_line_has_the_tokens_of_the_whole(tmp_path):
    line = "the cat sat on the ñandú " * (MAX_CHUNK_CHARACTERS // 16)
    (tmp_path / "a.txt").write_text(line)
    store = prepare_store([tmp_path / "a.txt"], tmp_path / "new", tokenizer=tokenizer(), shard_tokens=10**5)
    assert len(store.index.shards) > 1
    assert store.n_documents == 1
    assert store.document(0).tolist()[:-1] == tokenizer().encode(line.strip())
    assert store.document_bytes().tolist() == [len(line.strip().encode())]


def test_texts_for_a_tokenizer_come_in_parts_up_to_a_limit(tmp_path, paths):
    calls = []
    texts = list(read_texts(paths, progress=lambda done, total: calls.append((done, total))))
    assert texts == TEXTS
    size = sum(path.stat().st_size for path in paths)
    assert calls[-1] == (size, size)
    assert list(read_texts(paths, max_characters=len(TEXTS[0]) + 1)) == TEXTS[:2]


def test_a_large_vocabulary_takes_four_bytes(tmp_path, paths):
    backend = Tokenizer(tokenizer().backend, tokenizer().special_tokens).backend
    backend = type(backend).from_str(backend.to_str())
    backend.add_tokens([f"<{n}>" for n in range(70_000)])
    large = Tokenizer(backend, tokenizer().special_tokens)
    store = prepare_store(paths, tmp_path / "new", tokenizer=large)
    assert store.index.dtype == "uint32"
    assert np.array_equal(store.document(0)[:-1], large.encode(TEXTS[0]))
    assert isinstance(TokenStore.open(tmp_path / "new", verify=True), TokenStore)


def test_a_store_may_have_some_of_a_files_documents(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\n<|endoftext|>\n".join(TEXTS))
    train = prepare_store([f"{path}[:-5]"], tmp_path / "train", tokenizer=tokenizer())
    held_out = prepare_store([f"{path}[-5:]"], tmp_path / "held-out", tokenizer=tokenizer())
    assert (train.n_documents, held_out.n_documents) == (len(TEXTS) - 5, 5)
    assert tokenizer().decode(held_out.document(0).tolist()) == TEXTS[-5]
