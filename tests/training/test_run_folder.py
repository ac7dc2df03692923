"""Tests for run folders and checkpoints."""

import errno
import json
import os
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qkv.errors import DiskError, RunError
from qkv.training import RunFolder, open_run
from tests.failing_disk import failing_disk
from tests.training.runs import build_cpu_trainer, checkpoint_contents, copy_run, logged_metrics, resume_to_end


@pytest.fixture
def folder(trained, tmp_path) -> Path:
    """A finished run of 13 steps with checkpoints 12 and 13."""
    return copy_run(trained, tmp_path / "copy").run.path


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 64
    path.write_bytes(content)


def test_a_new_run_needs_a_new_or_empty_folder(tmp_path):
    RunFolder.create(tmp_path / "a" / "b")
    RunFolder.create(tmp_path / "a" / "b")
    (tmp_path / "a" / "b" / "recipe.toml.partial").touch()
    RunFolder.create(tmp_path / "a" / "b")
    (tmp_path / "a" / "b" / "mine.txt").touch()
    with pytest.raises(RunError, match=r"b: .*mine\.txt.*--out"):
        RunFolder.create(tmp_path / "a" / "b")
    (tmp_path / "a" / "b" / "finetune.toml").touch()
    with pytest.raises(RunError, match=r"qkv finetune --resume .*b$"):
        RunFolder.create(tmp_path / "a" / "b")
    with pytest.raises(RunError, match=r"mine\.txt: "):
        RunFolder.create(tmp_path / "a" / "b" / "mine.txt")


def test_the_last_checkpoints_and_the_best_one_are_kept(tmp_path):
    run = RunFolder(tmp_path)
    for step in (1, 2, 5, 7, 11):
        run.checkpoint_folder(step).mkdir(parents=True)
    (run.checkpoints / "step-x").mkdir()
    run.delete_old_checkpoints(keep=2, best=2)
    assert run.checkpoint_steps() == [2, 7, 11]


def test_best_checkpoint_returns_the_best_step(folder):
    run = RunFolder(folder)
    progress, last = run.latest_valid_checkpoint(print)
    assert last == run.checkpoint_folder(13)
    assert run.best_or_latest_checkpoint() == run.checkpoint_folder(progress.best_step)


def test_a_damaged_latest_checkpoint_is_logged_and_skipped(folder, trained):
    flip(folder / "checkpoints" / "step-00000013" / "model.safetensors", 300)
    (message,) = resume_to_end(folder)
    assert message.startswith(f"{folder}/checkpoints/step-00000013/model.safetensors: ")
    assert logged_metrics(folder) == logged_metrics(trained.run.path)
    assert checkpoint_contents(folder) == checkpoint_contents(trained.run.path)


def count_detected_flips(folder: Path, n: int) -> int:
    """Returns how many of n flipped bytes of the latest checkpoint lead to one message and the previous checkpoint."""
    run, rng = RunFolder(folder), random.Random(0)
    files = sorted(run.checkpoint_folder(13).iterdir())
    sizes = [path.stat().st_size for path in files]
    n_detected = 0
    for path in rng.choices(files, weights=sizes, k=n):
        at, messages = rng.randrange(path.stat().st_size), []
        flip(path, at)
        progress, _ = run.latest_valid_checkpoint(messages.append)
        n_detected += progress.step == 12 and len(messages) == 1 and str(path.parent) in messages[0]
        flip(path, at)
    return n_detected


def test_every_flipped_byte_is_detected(folder):
    assert count_detected_flips(folder, 50) == 50


@pytest.mark.long
def test_a_thousand_flipped_bytes_are_detected(folder):
    assert count_detected_flips(folder, 1000) == 1000


def test_no_valid_checkpoint_raises_an_error_with_their_number(folder):
    for step in (12, 13):
        (folder / "checkpoints" / f"step-{step:08d}" / "manifest.json").unlink()
    messages = []
    with pytest.raises(RunError, match=r"\b2\b"):
        RunFolder(folder).latest_valid_checkpoint(messages.append)
    assert [re.search(r"step-\d+", message)[0] for message in messages] == ["step-00000013", "step-00000012"]


def test_a_checkpoint_with_the_name_of_another_step_is_detected(folder):
    shutil.rmtree(folder / "checkpoints" / "step-00000013")
    shutil.copytree(folder / "checkpoints" / "step-00000012", folder / "checkpoints" / "step-00000013")
    messages = []
    assert RunFolder(folder).latest_valid_checkpoint(messages.append)[0].step == 12
    (message,) = messages
    assert re.match(rf"{re.escape(str(folder))}/checkpoints/step-00000013: .*\b12\b", message)


def test_a_run_killed_before_its_first_checkpoint_starts_over(run, trained):
    prepared_run = run()
    (prepared_run.run.path / "checkpoints" / ".partial-step-00000003-77").mkdir(parents=True)
    prepared_run.run.log({"step": 1, "loss": 9.0})
    assert resume_to_end(prepared_run.run.path) == []
    assert logged_metrics(prepared_run.run.path) == logged_metrics(trained.run.path)
    assert checkpoint_contents(prepared_run.run.path) == checkpoint_contents(trained.run.path)


def test_missing_metrics_are_logged_and_the_run_continues(folder):
    shutil.rmtree(folder / "checkpoints" / "step-00000013")
    metrics = folder / "metrics.jsonl"
    n_bytes = json.loads((folder / "checkpoints" / "step-00000012" / "progress.json").read_text())["metrics_bytes"]
    os.truncate(metrics, 100)
    (message,) = resume_to_end(folder)
    assert re.match(rf"{re.escape(str(metrics))}: .*\b100\b.*\b{n_bytes}\b", message)


def test_two_processes_cannot_train_in_one_folder(folder):
    with (
        RunFolder(folder).locked(),
        pytest.raises(RunError, match=re.escape(str(folder))),
        RunFolder(folder).locked(),
    ):
        pass
    with RunFolder(folder).locked():
        pass


def test_another_environment_is_logged(folder):
    trainer = build_cpu_trainer(open_run(folder))
    trainer.progress = replace(trainer.progress, environment="torch 9.9, 64 threads, abacus")
    messages = []
    trainer.resume(messages.append)
    (message,) = messages
    assert "torch 9.9, 64 threads, abacus" in message
    assert f"torch {torch.__version__}" in message


@pytest.mark.parametrize("at", [1, 9, 24])
def test_a_disk_error_loses_only_the_steps_since_the_last_checkpoint(run, trained, at, monkeypatch):
    prepared_run = run()
    save = prepared_run.run.save

    def save_with_disk_error(progress, **files):
        with failing_disk(at if progress.step == 6 else None):
            save(progress, **files)

    monkeypatch.setattr(prepared_run.run, "save", save_with_disk_error)
    with pytest.raises(DiskError, match=r"(step-00000006|metrics\.jsonl): .*\bNo space left\b"):
        build_cpu_trainer(prepared_run).train()
    assert prepared_run.run.checkpoint_steps() == [3, 5]
    assert resume_to_end(prepared_run.run.path) == []
    assert logged_metrics(prepared_run.run.path) == logged_metrics(trained.run.path)
    assert checkpoint_contents(prepared_run.run.path) == checkpoint_contents(trained.run.path)


def test_metrics_that_cannot_be_written_raise_a_disk_error(run):
    prepared_run = run()
    with (
        failing_disk(1, errno.EIO),
        pytest.raises(DiskError, match=r"metrics\.jsonl: cannot write \d+ bytes: Input/output error"),
    ):
        build_cpu_trainer(prepared_run).train()
