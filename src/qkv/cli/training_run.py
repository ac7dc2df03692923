"""A run from its first file to its last step, told on standard error."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from qkv.cli.progress import bars, say
from qkv.errors import InputError, RunError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from qkv.config import Recipe, TrainingConfig
    from qkv.cost.preflight import Preflight
    from qkv.models import Model
    from qkv.training import Pace, Prepared, Ranks, Trainer
    from qkv.training.family import Bars
    from qkv.training.trainer import Report


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What is asked for beside the training."""

    tensorboard: bool = False
    profile: bool = False
    trace: Path | None = None

    def check(self) -> None:
        """What is missing is better said now than after the run."""
        from qkv.cli.profile import check_trace

        check_trace(self.trace)
        if self.tensorboard:
            from qkv.inspection.tensorboard import need_tensorboard

            need_tensorboard()

    @property
    def is_profiled(self) -> bool:
        return self.profile or self.trace is not None


def start_run(
    recipe: "Recipe",
    folder: Path,
    data: Path,
    *,
    device: "torch.device",
    ranks: "Ranks",
    minutes: float | None,
    asked: Beside,
) -> None:
    """`minutes`: change the recipe's steps to as many as fit, and again as the run goes."""
    from qkv.training import prepare_run

    seconds = None if minutes is None else 60 * minutes
    # Parts that fit so many processes, kept in the recipe: the run has the same numbers when fewer go on with it.
    recipe = recipe.replace(training=ranks.fitted(recipe.training))
    with _stoppable(folder, ranks):
        prepared = _by_first(
            ranks, folder, lambda bars: prepare_run(recipe, folder, data, progress=bars, seconds=seconds)
        )
    with _locked(folder, ranks), _stoppable(folder, ranks):
        prepared = _made_ready(prepared, device, ranks, seconds=seconds)
        _run(prepared, device, ranks, asked, seconds=seconds)


def resume_run(folder: Path, device: "torch.device", *, ranks: "Ranks", asked: Beside) -> None:
    """Go on where the run stood, be it in the middle of its preparation."""
    from qkv.training import go_on_preparing, open_run, preparing

    if not folder.is_dir():
        raise RunError(f"{folder}: there is no such run")
    with _locked(folder, ranks), _stoppable(folder, ranks):
        state, seconds = preparing(folder), None
        if not ranks.of_first(lambda: state is not None):
            prepared = open_run(folder)
        else:
            if ranks.is_first:
                say(f"{folder}: the preparation was not finished; going on with it")
            prepared = _by_first(ranks, folder, lambda bars: go_on_preparing(folder, progress=bars))
            given = ranks.of_first(lambda: -1.0 if state is None or state.seconds is None else state.seconds)
            seconds = None if given < 0 else given
            prepared = _made_ready(prepared, device, ranks, seconds=seconds)
        _run(prepared, device, ranks, asked, seconds=seconds)


def _by_first(ranks: "Ranks", folder: Path, make: "Callable[[Bars], Prepared]") -> "Prepared":
    """The first process makes the run ready; the others open what it made."""
    from qkv.training import made_by_another

    prepared = None
    if ranks.is_first:
        with bars() as progress:
            prepared = make(progress)
    ranks.wait()
    return made_by_another(folder) if prepared is None else prepared


@contextmanager
def _locked(folder: Path, ranks: "Ranks") -> Iterator[None]:
    from qkv.training import RunFolder

    with RunFolder(folder).locked() if ranks.is_first else nullcontext():
        yield


@contextmanager
def _stoppable(folder: Path, ranks: "Ranks") -> Iterator[None]:
    """Where there is no step to finish, a signal ends the command at once; what is done so far stays."""
    from qkv.training import Stopped, stop_at_once

    try:
        with stop_at_once():
            yield
    except Stopped as stop:
        if ranks.is_first:
            say(f"stopped by {stop.signal.name}; go on: qkv train --resume {folder}")
        sys.exit(128 + stop.signal)


def preflight(
    recipe: "Recipe", vocab_size: int, device: "torch.device", *, ranks: "Ranks"
) -> "Preflight":  # fmt: skip
    """Say what the run will take."""
    from qkv.cost import Mode, Precision, preflight
    from qkv.cost.calibration import fitting_calibration
    from qkv.training import matmul_rate
    from qkv.training.calibrating import device_name
    from qkv.training.objectives import is_mixed

    training = ranks.fitted(recipe.training)
    dtype = Precision.MIXED if is_mixed(training.precision, device) else Precision.FLOAT32
    plan = preflight(
        recipe.model_config_for(vocab_size),
        batch=training.micro_batch_size,
        length=training.seq_len,
        steps=training.steps,
        matmul_rate=matmul_rate(device),
        accumulation=-(-training.batch_size // (training.micro_batch_size * ranks.world)),
        n_devices=ranks.world,
        sharding=ranks.sharding,
        checkpointing=training.checkpoint_activations,
        loss_chunk=training.loss_chunk,
        optimizer=training.optimizer,
        averaging=training.ema_decay is not None,
        predictions=None if recipe.examples is None else recipe.examples.n_slots(training.seq_len),
        dtype=dtype,
        backend="cuda" if device.type == "cuda" else "cpu",
        calibration=fitting_calibration(Mode.TRAIN, dtype, device=device_name(device)),
    )
    if ranks.is_first:
        say(plan.line)
    return plan


def dry_run_of(recipe: "Recipe", device: "torch.device", *, ranks: "Ranks", is_timed: bool) -> None:
    """`is_timed`: a run would find its own number of steps."""
    preflight(recipe, recipe.tokenizer.vocab_size, device, ranks=ranks)
    if is_timed and ranks.is_first:
        say(f"these are the recipe's {recipe.training.steps:,} steps: a run times how many fit in --minutes")


def _made_ready(
    prepared: "Prepared", device: "torch.device", ranks: "Ranks", *, seconds: float | None
) -> "Prepared":  # fmt: skip
    from qkv.training import finish_preparing, fit_to_time

    corpus = prepared.corpus
    if ranks.is_first:
        say(f"{prepared.run.path}: {corpus.summary}, vocabulary {corpus.tokenizer.vocab_size:,}")
        if prepared.too_few:
            say(prepared.too_few)
    # As in `start_run`, for a preparation that others take up: what is trained is what the recipe says.
    fitted = prepared.recipe.replace(training=ranks.fitted(prepared.recipe.training))
    prepared = replace(prepared, recipe=fitted)
    if seconds is not None:
        prepared = fit_to_time(prepared, device=device, seconds=seconds, ranks=ranks)
    if ranks.is_first:
        finish_preparing(prepared)
    return prepared


def _run(prepared: "Prepared", device: "torch.device", ranks: "Ranks", asked: Beside, *, seconds: float | None) -> None:
    """All train; the first shows it, and what came of it. `seconds`: what the steps were just fitted to."""
    recipe = prepared.recipe
    plan = preflight(recipe, prepared.corpus.tokenizer.vocab_size, device, ranks=ranks)
    if asked.is_profiled:
        _profile(prepared, device, ranks, plan, trace=asked.trace)
    if not ranks.is_first:
        trainer = _trainer(prepared, device, ranks, lambda _entry: None)
        trainer.resume(lambda _said: None)
        stop = trainer.train(_pace(seconds, lambda _plan: None))
    else:
        from qkv.cli.training_progress import TrainingProgress, draw_curves, say_result, say_where
        from qkv.training import write_recipe

        def keep(training: "TrainingConfig") -> None:
            write_recipe(prepared.run, recipe.replace(training=training))
            progress.replan(training.steps)

        progress = TrainingProgress(plan)
        trainer = _trainer(prepared, device, ranks, progress.report)
        trainer.resume(say)
        say_where(trainer)
        with progress:
            stop = trainer.train(_pace(seconds, keep))
        draw_curves(trainer, tensorboard=asked.tensorboard)
        say_result(trainer, recipe.family, stop)
    if stop.signal is not None:
        sys.exit(128 + stop.signal)


def _trainer(prepared: "Prepared", device: "torch.device", ranks: "Ranks", report: "Report") -> "Trainer":
    from qkv.training import build_trainer

    return build_trainer(prepared, device=device, report=report, start=_first_weights(prepared), ranks=ranks)


def _pace(seconds: float | None, keep: "Callable[[TrainingConfig], None]") -> "Pace | None":
    """None where the steps are what they are."""
    from qkv.training import Pace

    return None if seconds is None else Pace(seconds, keep=keep)


def _profile(
    prepared: "Prepared", device: "torch.device", ranks: "Ranks", plan: "Preflight", *, trace: Path | None
) -> None:
    """A few steps of a throw-away model."""
    from qkv.cli.profile import show_profile
    from qkv.training import build_trainer
    from qkv.training.profiling import profile_training

    trainer = build_trainer(prepared, device=device, report=lambda _entry: None, ranks=ranks)
    profile = profile_training(trainer, plan.step, trace=trace if ranks.is_first else None)
    if ranks.is_first:
        training = prepared.recipe.training
        show_profile(profile, f"one step of {training.batch_size:,} × {training.seq_len:,} tokens")


def _first_weights(prepared: "Prepared") -> "Model | None":
    """What the run begins with; later its own checkpoints say."""
    start = prepared.recipe.start_from
    if start is None or prepared.run.steps():
        return None
    from qkv.tasks import load_weights

    model = load_weights(start).model
    if model.config.family != prepared.recipe.family:
        raise InputError(f"{start}: is a {model.config.family}, and the recipe trains a {prepared.recipe.family}")
    return model
