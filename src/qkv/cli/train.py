"""`qkv train`: your own text in, a trained model out."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.errors import ConfigError, InputError, QKVError

if TYPE_CHECKING:
    import torch

    from qkv.config import Recipe
    from qkv.training import Prepared, Trainer


def train(
    what: Annotated[str | None, typer.Argument(help="`gpt` to train on --text, or a recipe (RECIPE.toml).")] = None,
    more: Annotated[
        list[str] | None, typer.Argument(help="More text files; for a recipe, settings such as a.b=c.")
    ] = None,
    *,
    text: Annotated[
        list[str] | None, typer.Option(help="A text file or folder to train on; may be given again.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(min=0.05, help="Time to train for; sets the steps.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Updates to make.")] = None,
    start: Annotated[Path | None, typer.Option("--from", help="A model to begin with.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder: new or empty.")] = None,
    data: Annotated[
        Path | None, typer.Option(envvar="QKV_DATA", help="The folder that a recipe's files lie in.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would take, and train nothing.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")] = "auto",
    seed: Annotated[int | None, typer.Option(min=0, help="Where chance starts; 0 unless the recipe says.")] = None,
) -> None:
    """Train a model on your own text, follow a recipe, or go on with a run.

    A run can be stopped with Ctrl-C and resumed: nothing is lost, and the numbers are those of an unbroken run.

    \b
    Examples:
      qkv train gpt --text book.txt --minutes 5 --out run
      qkv train recipes/shakespeare.toml training.steps=200 --data texts --out run
      qkv train --resume run
    """
    from qkv.training import open_run

    target = _device(device)
    if resume is not None:
        if what is not None or text or out is not None:
            raise InputError("--resume goes on with a run as it was: give nothing else with it")
        _run(open_run(resume), target, start=None, resuming=True)
        return
    if what is None:
        raise InputError(
            "what to train? `qkv train gpt --text FILE`, `qkv train RECIPE.toml`, or `qkv train --resume RUN`"
        )
    if what == "gpt":
        recipe = _own_text([*(text or []), *(more or [])], minutes=minutes, steps=steps, device=target, start=start)
        folder = Path()
    else:
        from qkv.config import load_recipe

        if text or steps is not None:
            raise InputError("a recipe says its text and steps itself; change them: data.train=… training.steps=…")
        recipe, folder = load_recipe(what, tuple(more or [])), data if data is not None else Path()
    if seed is not None:
        recipe = recipe.replace(training=recipe.training.replace(seed=seed))
    if dry_run:
        _preflight(recipe, recipe.tokenizer.vocabulary_size, target)
        return
    prepared = _prepare(recipe, out or _next_run_folder(), folder)
    if what == "gpt" and steps is None and minutes is None:
        minutes = 5.0
    if minutes is not None:
        prepared = _fit(prepared, target, 60 * minutes)
    _run(prepared, target, start=start, resuming=False)


def _own_text(
    files: list[str], *, minutes: float | None, steps: int | None, device: "torch.device", start: Path | None
) -> "Recipe":
    from qkv.data import find_sources
    from qkv.training import choose_recipe, matmul_rate

    if not files:
        raise InputError("no text was given: qkv train gpt --text FILE")
    if minutes is not None and steps is not None:
        raise InputError("--minutes and --steps were both given; choose one")
    n_bytes = sum(source.size for source in find_sources(files))
    recipe = choose_recipe(
        [str(Path(file).resolve()) for file in files],
        n_bytes=n_bytes,
        seconds=60 * (minutes or 5.0),
        rate=matmul_rate(device),
    )
    if steps is not None:
        every = max(1, steps // 10)
        training = recipe.training.replace(
            steps=steps, warmup_steps=min(50, steps // 10), evaluate_every=every, save_every=every
        )
        recipe = recipe.replace(training=training)
    return recipe if start is None else _shaped_like(recipe, start)


def _shaped_like(recipe: "Recipe", start: Path) -> "Recipe":
    """To begin with a model means to have its shape and its tokenizer."""
    from qkv.tasks import find_folder, load_weights

    loaded, folder = load_weights(start), find_folder(start)
    config = loaded.model.config.model_dump(mode="json", exclude={"family", "vocabulary_size"}, exclude_none=True)
    config["dropout"] = recipe.model["dropout"]
    size = loaded.model.config.vocabulary_size
    length = min(recipe.training.length, loaded.model.config.context_length)
    return recipe.replace(
        model=config,
        tokenizer={"path": str((folder / "tokenizer.json").resolve()), "vocabulary_size": size},
        training=recipe.training.replace(length=length, learning_rate=recipe.training.learning_rate / 4),
        start_from=str(start.resolve()),
    )


def _prepare(recipe: "Recipe", folder: Path, data: Path) -> "Prepared":
    from contextlib import ExitStack

    from qkv.cli.progress import bar, say
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


def _run(prepared: "Prepared", device: "torch.device", *, start: Path | None, resuming: bool) -> None:
    from qkv.cli.progress import say
    from qkv.cli.training_progress import TrainingProgress
    from qkv.tasks import load_weights
    from qkv.training import build_trainer

    begin: Any = None if start is None else load_weights(start).model
    rate = _preflight(prepared.recipe, prepared.tokenizer.vocabulary_size, device)
    progress = TrainingProgress(prepared.recipe, rate=rate, vocabulary_size=prepared.tokenizer.vocabulary_size)
    trainer = build_trainer(prepared, device=device, report=progress.report, start=begin)
    if resuming:
        trainer.resume(say)
        say(f"going on at step {trainer.progress.step} of {prepared.recipe.training.steps}")
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
    from qkv.cli.progress import say
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


def _preflight(recipe: "Recipe", vocabulary_size: int, device: "torch.device") -> float:
    """Say what the run will take; returns the device's matrix rate."""
    from qkv.cli.progress import say
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


def _device(name: str) -> "torch.device":
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: it is cpu, cuda or auto")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU here")
    return torch.device(name)


def _next_run_folder() -> Path:
    number = 1
    while os.path.lexists(f"runs/{number}"):
        number += 1
    return Path(f"runs/{number}")
