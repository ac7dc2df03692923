"""A run small enough to be made, killed and resumed in a second."""

import json
import os
import random
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import torch

from qkv.config import Recipe
from qkv.training import PreparedRun, Trainer, build_trainer, finish_preparation, open_run, prepare_run

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran")


def write_text(path: Path, n_sentences: int = 150) -> Path:
    chance = random.Random(0)
    path.write_text(". ".join(" ".join(chance.choices(WORDS, k=7)) for _ in range(n_sentences)))
    return path


def recipe(**training) -> Recipe:
    """Muon and AdamW, dropout, accumulation, evaluation: all that a resumed run must take up again."""
    usual = {
        "steps": 13, "batch_size": 4, "micro_batch_size": 2, "seq_len": 11, "optimizer": "muon", "warmup_steps": 3,
        "eval_every": 5, "save_every": 3,
    }  # fmt: skip
    return Recipe(
        family="gpt",
        tokenizer={"kind": "char", "vocab_size": 60},
        model={"context_length": 13, "n_layers": 2, "d_model": 14, "n_heads": 2, "dropout": 0.1},
        data={"train": ("text.txt",), "validation_fraction": 0.1},
        training=usual | training,
    )


def make_ready(folder: Path, **training) -> PreparedRun:
    """A new run in `folder`/run on a text in `folder`."""
    folder.mkdir(exist_ok=True)
    write_text(folder / "text.txt")
    prepared = prepare_run(recipe(**training), folder / "run", folder, progress=lambda _label: lambda _n, _all: None)
    finish_preparation(prepared)
    return prepared


def copy_of(prepared: PreparedRun, folder: Path, **training) -> PreparedRun:
    """The same run in another folder, with some of its training settings changed."""
    shutil.copytree(prepared.run.path, folder)
    if training:
        copy = open_run(folder)
        recipe = copy.recipe.replace(training=copy.recipe.training.replace(**training))
        finish_preparation(replace(copy, recipe=recipe))
    return open_run(folder)


def trainer_of(prepared: PreparedRun, **changes) -> Trainer:
    return build_trainer(prepared, device=torch.device("cpu"), report=lambda _entry: None, **changes)


def go_on(folder: Path) -> list[str]:
    """Resume the run and train it to its end; what was said."""
    said: list[str] = []
    trainer = trainer_of(open_run(folder))
    trainer.resume(said.append)
    trainer.train()
    return said


def stopped_after(trainer: Trainer, n_steps: int) -> None:
    """Train until a signal comes, just after so many steps."""

    def report(entry):
        if entry["step"] == n_steps and "loss" in entry:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer.report = report
    assert trainer.train().signal is signal.SIGTERM


def curve(folder: Path) -> list[dict[str, object]]:
    """Every line of the metrics, floats to the last bit, without the time."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("seconds", None)
    return [{k: v.hex() if isinstance(v, float) else v for k, v in line.items()} for line in lines]


def checkpoints(folder: Path) -> dict[str, bytes]:
    """Every file of every checkpoint, but for what holds the time, by its path."""
    timed = ("manifest.json", "progress.json")
    files = sorted(path for path in (folder / "checkpoints").rglob("*") if path.is_file() and path.name not in timed)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
