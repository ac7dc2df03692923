"""A folder is there whole or not at all, and no changed byte goes unseen."""

import errno
import os
import random
import shutil
from types import SimpleNamespace

import pytest
import torch

from qkv.errors import DiskError, WeightsError
from qkv.weights.atomic_folder import MANIFEST, PARTIAL_PREFIX, check_folder, read_tensors, write_folder
from tests.disks import refusing

TENSORS = {"model.safetensors": {"a": torch.arange(35.0).reshape(5, 7), "b": torch.ones(3)},
           "resume.safetensors": {"m": torch.zeros(11, dtype=torch.int64)}}  # fmt: skip
TEXTS = {"config.json": '{"family": "gpt"}', "progress.json": "{}"}


@pytest.fixture
def folder(tmp_path):
    write_folder(tmp_path / "whole", tensors=TENSORS, text_files=TEXTS)
    return tmp_path / "whole"


def test_what_is_written_comes_back(folder):
    check_folder(folder)
    back = read_tensors(folder / "model.safetensors")
    assert all(torch.equal(back[name], tensor) for name, tensor in TENSORS["model.safetensors"].items())
    assert (folder / "config.json").read_text() == TEXTS["config.json"]
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}


def flips_that_go_unseen(folder, n):
    """Flip `n` random bits of random bytes one after another, in files drawn by their size."""
    chance = random.Random(0)
    files = sorted(folder.iterdir())
    sizes = [path.stat().st_size for path in files]
    unseen = []
    for path in chance.choices(files, weights=sizes, k=n):
        whole = path.read_bytes()
        at, bit = chance.randrange(len(whole)), 1 << chance.randrange(8)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
        try:
            check_folder(folder)
            unseen.append((path.name, at, bit))
        except WeightsError:
            pass
        path.write_bytes(whole)
    check_folder(folder)
    return unseen


def test_no_flipped_byte_goes_unseen(folder):
    assert flips_that_go_unseen(folder, 200) == []


@pytest.mark.long
def test_no_flipped_byte_of_twenty_thousand_goes_unseen(folder):
    assert flips_that_go_unseen(folder, 20_000) == []


def test_every_byte_of_the_manifest_counts(folder):
    manifest = folder / MANIFEST
    whole = manifest.read_bytes()
    for at in range(len(whole)):
        manifest.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(WeightsError, match=r"manifest\.json|missing|not in the manifest"):
            check_folder(folder)


@pytest.mark.parametrize("name", [*TENSORS, *TEXTS, MANIFEST])
def test_a_file_cut_short_grown_or_gone_is_seen(folder, name):
    path = folder / name
    whole = path.read_bytes()
    for changed in (whole[:-1], whole[: len(whole) // 2], b"", whole + b"\n"):
        path.write_bytes(changed)
        with pytest.raises(WeightsError, match=name):
            check_folder(folder)
    path.unlink()
    with pytest.raises(WeightsError, match=f"{name}: (missing|cannot be read)"):
        check_folder(folder)


def test_a_file_too_many_is_seen(folder):
    (folder / "more.txt").write_text("?")
    with pytest.raises(WeightsError, match=r"more\.txt: not in the manifest, which lists 4 files"):
        check_folder(folder)


def test_swapped_files_and_those_of_another_folder_are_seen(folder, tmp_path):
    others = {name: {key: t + 1 for key, t in file.items()} for name, file in TENSORS.items()}
    write_folder(tmp_path / "other", tensors=others, text_files=TEXTS)
    shutil.copy(tmp_path / "other" / "model.safetensors", folder)
    with pytest.raises(WeightsError, match=r"model\.safetensors: its bytes are not those that were written"):
        check_folder(folder)
    shutil.copy(tmp_path / "other" / MANIFEST, folder)
    with pytest.raises(WeightsError, match=r"resume\.safetensors: its bytes"):
        check_folder(folder)


def test_a_folder_in_the_place_of_a_file_is_seen(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    with pytest.raises(WeightsError, match=r"config\.json: cannot be read: Is a directory"):
        check_folder(folder)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"files": 1, "blake2b": ""}', b'{"files": {"a": 1}}',
                                     b"[" * 100_000, b"\xff"])  # fmt: skip
def test_a_manifest_that_is_none_is_refused(folder, content):
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(WeightsError, match=r"manifest\.json"):
        check_folder(folder)


def n_operations(tmp_path):
    with refusing() as disk:
        write_folder(tmp_path / "counted", tensors=TENSORS, text_files=TEXTS)
    return len(disk.names)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS])
def test_a_disk_that_refuses_anywhere_leaves_nothing_half_written(tmp_path, number):
    n = n_operations(tmp_path)
    assert n > 15
    for at in range(1, n + 1):
        target = tmp_path / f"{number}-{at}" / "new"
        with refusing(at, number), pytest.raises(DiskError) as refused:
            write_folder(target, tensors=TENSORS, text_files=TEXTS)
        line = f"{target}: cannot write 32768 bytes: {os.strerror(number)} ("
        assert str(refused.value).startswith(line)
        assert str(refused.value).endswith(" bytes free)")
        assert not list(target.parent.glob(f"{PARTIAL_PREFIX}*"))
        if target.exists():  # the last sync failed: what is there is whole
            check_folder(target)


def test_too_little_room_is_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=32767))
    with pytest.raises(DiskError, match=r"new: cannot write 32768 bytes: No space left on device \(32767 bytes free\)"):
        write_folder(tmp_path / "new", tensors=TENSORS, text_files=TEXTS)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_an_older_folder_alone(folder, tmp_path):
    with refusing(3), pytest.raises(DiskError):
        write_folder(tmp_path / "new", tensors=TENSORS, text_files=TEXTS)
    check_folder(folder)


@pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0{}", b"\xff" * 64])
def test_weights_that_are_no_safetensors_are_refused(tmp_path, content):
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=r"a\.safetensors: not a safetensors file"):
        read_tensors(tmp_path / "a.safetensors")
    with pytest.raises(WeightsError, match=r"b\.safetensors: cannot be read"):
        read_tensors(tmp_path / "b.safetensors")
