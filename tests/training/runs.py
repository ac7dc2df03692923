"""Helpers for runs that are small enough to be created, killed and resumed in a second."""

import json
import os
import random
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import torch

from qkv.config import Recipe
from qkv.training import PreparedRun, Trainer, build_trainer, open_run, prepare_run, write_fingerprints_and_final_recipe

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran")


def write_text(path: Path, n_sentences: int = 150) -> Path:
    rng = random.Random(0)
    path.write_text(". ".join(" ".join(rng.choices(WORDS, k=7)) for _ in range(n_sentences)))
    return path


def recipe(**training) -> Recipe:
    """Recipe with Muon, AdamW, dropout, gradient accumulation and evaluation: all that a resumed run restores."""
    defaults = {
        "steps": 13,
        "batch_size": 4,
        "micro_batch_size": 2,
        "seq_len": 11,
        "optimizer": "muon",
        "warmup_steps": 3,
        "eval_every": 5,
        "save_every": 3,
    }
    return Recipe(
        family="gpt",
        tokenizer={"kind": "char", "vocab_size": 60},
        model={"context_length": 13, "n_layers": 2, "d_model": 14, "n_heads": 2, "dropout": 0.1},
        data={"train": ("text.txt",), "validation_fraction": 0.1},
        training=defaults | training,
    )


def prepare_small_run(folder: Path, **training) -> PreparedRun:
    """Prepare a new run in `folder`/run on a text in `folder`."""
    folder.mkdir(exist_ok=True)
    write_text(folder / "text.txt")
    prepared = prepare_run(recipe(**training), folder / "run", folder, progress=lambda _label: lambda _n, _all: None)
    write_fingerprints_and_final_recipe(prepared)
    return prepared


def copy_run(prepared: PreparedRun, folder: Path, **training) -> PreparedRun:
    """Copy a run to another folder and change some of its training settings."""
    shutil.copytree(prepared.run.path, folder)
    if training:
        copy = open_run(folder)
        recipe = copy.recipe.replace(training=copy.recipe.training.replace(**training))
        write_fingerprints_and_final_recipe(replace(copy, recipe=recipe))
    return open_run(folder)


def build_cpu_trainer(prepared: PreparedRun, **changes) -> Trainer:
    """Build a trainer on the CPU that reports nothing."""
    return build_trainer(prepared, device=torch.device("cpu"), report=lambda _entry: None, **changes)


def resume_to_end(folder: Path) -> list[str]:
    """Resume the run, train it to its end, and return the logged messages."""
    messages: list[str] = []
    trainer = build_cpu_trainer(open_run(folder))
    trainer.resume(messages.append)
    trainer.train()
    return messages


def train_until_signal(trainer: Trainer, n_steps: int) -> None:
    """Train until a signal arrives right after `n_steps` steps."""

    def report(entry):
        if entry["step"] == n_steps and "loss" in entry:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer.report = report
    assert trainer.train().signal is signal.SIGTERM


def logged_metrics(folder: Path) -> list[dict[str, object]]:
    """Returns all entries of metrics.jsonl without times, and with floats in hex so that they compare bit for bit."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("seconds", None)
    return [{k: v.hex() if isinstance(v, float) else v for k, v in line.items()} for line in lines]


def checkpoint_contents(folder: Path) -> dict[str, bytes]:
    """Returns the contents of all checkpoint files by path, except those that contain times."""
    files_with_times = ("manifest.json", "progress.json")
    files = sorted(
        path for path in (folder / "checkpoints").rglob("*") if path.is_file() and path.name not in files_with_times
    )
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
