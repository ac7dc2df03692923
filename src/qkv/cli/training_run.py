"""A run from its first file to its last step, told on standard error."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv.cli.progress import bar, say
from qkv.errors import QKVError

if TYPE_CHECKING:
    import torch

    from qkv.config import Recipe
    from qkv.training import Prepared, Trainer


def start_run(recipe: "Recipe", folder: Path, data: Path, *, device: "torch.device", minutes: float | None) -> None:
    """`minutes`: change the recipe's steps to as many as fit."""
    prepared = _prepare(recipe, folder, data)
    if minutes is not None:
        prepared = _fit(prepared, device, 60 * minutes)
    _run(prepared, device, resuming=False)


def resume_run(folder: Path, device: "torch.device") -> None:
    from qkv.training import open_run

    _run(open_run(folder), device, resuming=True)


def preflight(recipe: "Recipe", vocabulary_size: int, device: "torch.device") -> float:
    """Say what the run will take; returns the device's matrix rate."""
    from qkv.cost import preflight
    from qkv.training import matmul_rate

    rate, training = matmul_rate(device), recipe.training
    plan = preflight(
        recipe.model_config_for(vocabulary_size),
        batch=training.micro_batch_size,
        length=training.length,
        steps=training.steps,
        matmul_rate=rate,
        accumulation=training.batch_size // training.micro_batch_size,
        checkpointing=training.checkpoint_activations,
        loss_chunk=training.loss_chunk,
    )
    say(plan.line)
    return rate


def _prepare(recipe: "Recipe", folder: Path, data: Path) -> "Prepared":
    from qkv.training import prepare_run

    with ExitStack() as stack:
        bars: list[ExitStack] = []

        def next_bar(label: str) -> Callable[[int, int], None]:
            while bars:
                bars.pop().close()
            own = ExitStack()
            bars.append(stack.enter_context(own))
            return own.enter_context(bar(label))

        prepared = prepare_run(recipe, folder, data, progress=next_bar)
    held_out = 0 if prepared.validation is None else prepared.validation.n_tokens
    say(
        f"{folder}: {prepared.train.n_tokens:,} tokens to train on, {held_out:,} held out, "
        f"vocabulary {prepared.tokenizer.vocabulary_size:,}"
    )
    return prepared


def _fit(prepared: "Prepared", device: "torch.device", seconds: float) -> "Prepared":
    """Time a few steps on a throw-away model, and write into the recipe how many fit."""
    from dataclasses import replace

    from qkv.training import build_trainer, fit_steps
    from qkv.training.prepare import write_recipe

    trainer = build_trainer(prepared, device=device, report=lambda _entry: None)
    recipe = fit_steps(prepared.recipe, seconds=seconds, seconds_a_step=trainer.seconds_a_step())
    write_recipe(prepared.run, recipe)
    return replace(prepared, recipe=recipe)


def _run(prepared: "Prepared", device: "torch.device", *, resuming: bool) -> None:
    from qkv.cli.training_progress import TrainingProgress
    from qkv.tasks import load_weights
    from qkv.training import build_trainer

    recipe = prepared.recipe
    begin: Any = None if recipe.start_from is None or resuming else load_weights(recipe.start_from).model
    rate = preflight(recipe, prepared.tokenizer.vocabulary_size, device)
    progress = TrainingProgress(recipe, rate=rate, vocabulary_size=prepared.tokenizer.vocabulary_size)
    trainer = build_trainer(prepared, device=device, report=progress.report, start=begin)
    if resuming:
        trainer.resume(say)
        say(f"going on at step {trainer.progress.step} of {recipe.training.steps}")
    with progress:
        stop = trainer.train()
    _finish(trainer)
    if stop.signal is not None:
        say(
            f"stopped by {stop.signal.name} at step {trainer.progress.step}; "
            f"go on: qkv train --resume {trainer.run.path}"
        )
        sys.exit(stop.exit_code)


def _finish(trainer: "Trainer") -> None:
    from qkv.inspection.curves import loss_curve

    path, progress = trainer.run.path, trainer.progress
    try:
        loss_curve(trainer.run.metrics).savefig(path / "loss.png")
    except QKVError as error:
        say(str(error))
    best = (
        ""
        if progress.best_loss is None
        else f"; best validation loss {progress.best_loss:.4f} at step {progress.best_step}"
    )
    print(f"{path}: {progress.step:,} steps, {progress.n_tokens:,} tokens, {progress.seconds:.0f} s{best}")
    say(f'try it: qkv generate {path} "Once upon a time"')
