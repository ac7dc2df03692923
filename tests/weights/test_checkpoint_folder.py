"""Folders are written completely or not at all, and every changed byte is detected."""

import errno
import os
import random
import shutil
from types import SimpleNamespace

import pytest
import torch

from qkv.errors import DiskError, WeightsError
from qkv.weights.checkpoint_folder import (
    MANIFEST,
    PARTIAL_PREFIX,
    check_folder_matches_manifest,
    read_safetensors,
    write_folder_atomically_with_manifest,
)
from tests.failing_disk import failing_disk

TENSORS = {"model.safetensors": {"a": torch.arange(35.0).reshape(5, 7), "b": torch.ones(3)},
           "resume.safetensors": {"m": torch.zeros(11, dtype=torch.int64)}}  # fmt: skip
TEXTS = {"config.json": '{"family": "gpt"}', "progress.json": "{}"}


@pytest.fixture
def folder(tmp_path):
    write_folder_atomically_with_manifest(tmp_path / "complete", tensors=TENSORS, text_files=TEXTS)
    return tmp_path / "complete"


def test_a_written_folder_can_be_read_back(folder):
    check_folder_matches_manifest(folder)
    back = read_safetensors(folder / "model.safetensors")
    assert all(torch.equal(back[name], tensor) for name, tensor in TENSORS["model.safetensors"].items())
    assert (folder / "config.json").read_text() == TEXTS["config.json"]
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}


def undetected_bit_flips(folder, n):
    """Flip `n` random bits one at a time, in files sampled by their size, and return those that are not detected."""
    generator = random.Random(0)
    files = sorted(folder.iterdir())
    sizes = [path.stat().st_size for path in files]
    undetected = []
    for path in generator.choices(files, weights=sizes, k=n):
        content = path.read_bytes()
        at, bit = generator.randrange(len(content)), 1 << generator.randrange(8)
        path.write_bytes(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
        try:
            check_folder_matches_manifest(folder)
            undetected.append((path.name, at, bit))
        except WeightsError:
            pass
        path.write_bytes(content)
    check_folder_matches_manifest(folder)
    return undetected


def test_every_flipped_byte_is_detected(folder):
    assert undetected_bit_flips(folder, 200) == []


@pytest.mark.long
def test_every_flipped_byte_of_twenty_thousand_is_detected(folder):
    assert undetected_bit_flips(folder, 20_000) == []


def test_every_changed_byte_of_the_manifest_is_detected(folder):
    manifest = folder / MANIFEST
    content = manifest.read_bytes()
    for at in range(len(content)):
        manifest.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(WeightsError, match=r"manifest"):
            check_folder_matches_manifest(folder)


@pytest.mark.parametrize("name", [*TENSORS, *TEXTS, MANIFEST])
def test_a_truncated_extended_or_missing_file_is_detected(folder, name):
    path = folder / name
    content = path.read_bytes()
    for changed in (content[:-1], content[: len(content) // 2], b"", content + b"\n"):
        path.write_bytes(changed)
        with pytest.raises(WeightsError, match=name):
            check_folder_matches_manifest(folder)
    path.unlink()
    with pytest.raises(WeightsError, match=rf"{name}: "):
        check_folder_matches_manifest(folder)


def test_an_additional_file_is_detected(folder):
    (folder / "more.txt").write_text("?")
    with pytest.raises(WeightsError, match=r"more\.txt: .*\b4 files"):
        check_folder_matches_manifest(folder)


def test_swapped_files_and_files_of_another_folder_are_detected(folder, tmp_path):
    others = {name: {key: t + 1 for key, t in file.items()} for name, file in TENSORS.items()}
    write_folder_atomically_with_manifest(tmp_path / "other", tensors=others, text_files=TEXTS)
    shutil.copy(tmp_path / "other" / "model.safetensors", folder)
    with pytest.raises(WeightsError, match=r"model\.safetensors: "):
        check_folder_matches_manifest(folder)
    shutil.copy(tmp_path / "other" / MANIFEST, folder)
    with pytest.raises(WeightsError, match=r"resume\.safetensors: "):
        check_folder_matches_manifest(folder)


def test_a_folder_instead_of_a_file_is_detected(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    with pytest.raises(WeightsError, match=r"config\.json: .*Is a directory"):
        check_folder_matches_manifest(folder)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"files": 1, "blake2b": ""}', b'{"files": {"a": 1}}',
                                     b"[" * 100_000, b"\xff"])  # fmt: skip
def test_an_invalid_manifest_is_rejected(folder, content):
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(WeightsError, match=r"manifest\.json"):
        check_folder_matches_manifest(folder)


def n_operations(tmp_path):
    with failing_disk() as disk:
        write_folder_atomically_with_manifest(tmp_path / "counted", tensors=TENSORS, text_files=TEXTS)
    return len(disk.operations)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS])
def test_a_disk_error_at_any_operation_leaves_no_partial_folder(tmp_path, number):
    n = n_operations(tmp_path)
    assert n > 15
    for at in range(1, n + 1):
        target = tmp_path / f"{number}-{at}" / "new"
        with failing_disk(at, number), pytest.raises(DiskError) as caught:
            write_folder_atomically_with_manifest(target, tensors=TENSORS, text_files=TEXTS)
        message = str(caught.value)
        assert message.startswith(f"{target}: ")
        assert "32768 bytes" in message
        assert os.strerror(number) in message
        assert not list(target.parent.glob(f"{PARTIAL_PREFIX}*"))
        if target.exists():  # only the last sync failed, so the folder is complete
            check_folder_matches_manifest(target)


def test_too_little_disk_space_is_reported_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=32767))
    with pytest.raises(DiskError, match=r"new: .*\b32768 bytes.*No space left on device.*\b32767 bytes"):
        write_folder_atomically_with_manifest(tmp_path / "new", tensors=TENSORS, text_files=TEXTS)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_does_not_change_an_existing_folder(folder, tmp_path):
    with failing_disk(3), pytest.raises(DiskError):
        write_folder_atomically_with_manifest(tmp_path / "new", tensors=TENSORS, text_files=TEXTS)
    check_folder_matches_manifest(folder)


@pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0{}", b"\xff" * 64])
def test_invalid_safetensors_files_are_rejected(tmp_path, content):
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=r"a\.safetensors: "):
        read_safetensors(tmp_path / "a.safetensors")
    with pytest.raises(WeightsError, match=r"b\.safetensors: "):
        read_safetensors(tmp_path / "b.safetensors")
