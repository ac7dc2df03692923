"""The run's folder: what stays, what is fallen back to, what is said."""

import errno
import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from qkv.errors import DiskError, RunError
from qkv.training import RunFolder, open_run
from tests.disks import refusing
from tests.training.runs import checkpoints, copy_of, curve, go_on, trainer_of


@pytest.fixture
def folder(trained, tmp_path) -> Path:
    """A finished run of 13 steps, checkpoints 12 and 13."""
    return copy_of(trained, tmp_path / "copy").run.path


def flip(path: Path, at: int) -> None:
    whole = bytearray(path.read_bytes())
    whole[at] ^= 64
    path.write_bytes(whole)


def test_a_new_run_needs_a_new_or_empty_folder(tmp_path):
    RunFolder.create(tmp_path / "a" / "b")
    RunFolder.create(tmp_path / "a" / "b")
    (tmp_path / "a" / "b" / "recipe.toml.partial").touch()
    RunFolder.create(tmp_path / "a" / "b")
    (tmp_path / "a" / "b" / "mine.txt").touch()
    with pytest.raises(RunError, match=r"b: is not empty \(it holds mine\.txt\); give another --out, or go on"):
        RunFolder.create(tmp_path / "a" / "b")
    (tmp_path / "a" / "b" / "finetune.toml").touch()
    with pytest.raises(RunError, match=r"or go on: qkv finetune --resume .*b$"):
        RunFolder.create(tmp_path / "a" / "b")
    with pytest.raises(RunError, match="is a file; a run needs a folder"):
        RunFolder.create(tmp_path / "a" / "b" / "mine.txt")


def test_the_last_ones_and_the_best_stay(tmp_path):
    run = RunFolder(tmp_path)
    for step in (1, 2, 5, 7, 11):
        run.checkpoint_folder(step).mkdir(parents=True)
    (run.checkpoints / "step-x").mkdir()
    run.delete_old_checkpoints(keep=2, best=2)
    assert run.checkpoint_steps() == [2, 7, 11]


def test_the_best_checkpoint_is_what_others_load(folder):
    run = RunFolder(folder)
    progress, last = run.latest_valid_checkpoint(print)
    assert last == run.checkpoint_folder(13)
    assert run.best_checkpoint() == run.checkpoint_folder(progress.best_step)


def test_a_damaged_newest_checkpoint_is_said_and_passed_over(folder, trained):
    flip(folder / "checkpoints" / "step-00000013" / "model.safetensors", 300)
    said = go_on(folder)
    newest = f"{folder}/checkpoints/step-00000013/model.safetensors"
    assert said == [
        f"{newest}: its bytes are not those that were written (hash differs); falling back to the checkpoint before"
    ]
    assert curve(folder) == curve(trained.run.path)
    assert checkpoints(folder) == checkpoints(trained.run.path)


def fall_backs(folder: Path, n: int) -> int:
    """How many of n flipped bytes of the newest checkpoint lead to the one before, with a word."""
    run, chance = RunFolder(folder), random.Random(0)
    files = sorted(run.checkpoint_folder(13).iterdir())
    sizes = [path.stat().st_size for path in files]
    noticed = 0
    for path in chance.choices(files, weights=sizes, k=n):
        at, said = chance.randrange(path.stat().st_size), []
        flip(path, at)
        progress, _ = run.latest_valid_checkpoint(said.append)
        noticed += progress.step == 12 and len(said) == 1 and str(path.parent) in said[0]
        flip(path, at)
    return noticed


def test_every_flipped_byte_leads_to_the_checkpoint_before(folder):
    assert fall_backs(folder, 50) == 50


@pytest.mark.long
def test_a_thousand_flipped_bytes_lead_to_the_checkpoint_before(folder):
    assert fall_backs(folder, 1000) == 1000


def test_nothing_good_is_said_with_the_number_tried(folder):
    for step in (12, 13):
        (folder / "checkpoints" / f"step-{step:08d}" / "manifest.json").unlink()
    said = []
    with pytest.raises(RunError, match="no checkpoint is good, of 2: nothing to go on from"):
        RunFolder(folder).latest_valid_checkpoint(said.append)
    assert [line.partition("; ")[2] for line in said] == [
        "falling back to the checkpoint before",
        "there is no checkpoint before",
    ]


def test_a_checkpoint_under_another_steps_name_is_seen(folder):
    shutil.rmtree(folder / "checkpoints" / "step-00000013")
    shutil.copytree(folder / "checkpoints" / "step-00000012", folder / "checkpoints" / "step-00000013")
    said = []
    assert RunFolder(folder).latest_valid_checkpoint(said.append)[0].step == 12
    assert said == [
        f"{folder}/checkpoints/step-00000013: holds the checkpoint of step 12; falling back to the checkpoint before"
    ]


def test_a_run_killed_before_its_first_checkpoint_begins_anew(run, trained):
    begun = run()
    (begun.run.path / "checkpoints" / ".partial-step-00000003-77").mkdir(parents=True)
    begun.run.log({"step": 1, "loss": 9.0})
    assert go_on(begun.run.path) == []
    assert curve(begun.run.path) == curve(trained.run.path)
    assert checkpoints(begun.run.path) == checkpoints(trained.run.path)


def test_lost_metrics_are_said_and_the_run_goes_on(folder):
    shutil.rmtree(folder / "checkpoints" / "step-00000013")
    metrics = folder / "metrics.jsonl"
    n_bytes = json.loads((folder / "checkpoints" / "step-00000012" / "progress.json").read_text())["metrics_bytes"]
    os.truncate(metrics, 100)
    assert go_on(folder) == [f"{metrics}: 100 bytes of {n_bytes} are left: the curve has a gap"]


def test_two_processes_cannot_train_in_one_folder(folder):
    with (
        RunFolder(folder).locked(),
        pytest.raises(RunError, match="another process is training here"),
        RunFolder(folder).locked(),
    ):
        pass
    with RunFolder(folder).locked():
        pass


def test_another_machine_is_said(folder):
    trainer = trainer_of(open_run(folder))
    trainer.progress = replace(trainer.progress, environment="torch 9.9, 64 threads, abacus")
    said = []
    trainer.resume(said.append)
    (line,) = said
    assert line.startswith("the run was made on torch ")
    assert line.endswith("this is torch 9.9, 64 threads, abacus: the last bits may differ")


@pytest.mark.parametrize("at", [1, 9, 24])
def test_a_disk_that_refuses_costs_no_more_than_the_steps_since_the_last_save(run, trained, at, monkeypatch):
    begun = run()
    save = begun.run.save

    def save_on_a_bad_disk(progress, **what):
        with refusing(at if progress.step == 6 else None):
            save(progress, **what)

    monkeypatch.setattr(begun.run, "save", save_on_a_bad_disk)
    with pytest.raises(
        DiskError, match=r"(step-00000006|metrics\.jsonl): cannot (write \d+ bytes|be written): No sp.*free"
    ):
        trainer_of(begun).train()
    assert begun.run.checkpoint_steps() == [3, 5]
    assert go_on(begun.run.path) == []
    assert curve(begun.run.path) == curve(trained.run.path)
    assert checkpoints(begun.run.path) == checkpoints(trained.run.path)


def test_metrics_that_cannot_be_written_end_the_run_with_a_line(run):
    begun = run()
    with (
        refusing(1, errno.EIO),
        pytest.raises(DiskError, match=r"metrics\.jsonl: cannot write \d+ bytes: Input/output error"),
    ):
        trainer_of(begun).train()
