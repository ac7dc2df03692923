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
    from qkv.cost.run_estimate import RunEstimate
    from qkv.models import Model
    from qkv.training import Distributed, PreparedRun, TimeBudget, Trainer
    from qkv.training.family import ProgressBars
    from qkv.training.trainer import MetricsCallback


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What is asked for beside the training."""

    tensorboard: bool = False
    profile: bool = False
    trace: Path | None = None

    def check(self) -> None:
        """What is missing is better said now than after the run."""
        from qkv.cli.profile_report import check_trace

        check_trace(self.trace)
        if self.tensorboard:
            from qkv.inspection.tensorboard import import_tensorboard

            import_tensorboard()

    @property
    def is_profiled(self) -> bool:
        return self.profile or self.trace is not None


def start_run(
    recipe: "Recipe",
    folder: Path,
    data: Path,
    *,
    device: "torch.device",
    distributed: "Distributed",
    minutes: float | None,
    asked: Beside,
) -> None:
    """`minutes`: change the recipe's steps to as many as fit, and again as the run goes."""
    from qkv.training import prepare_run

    seconds = None if minutes is None else 60 * minutes
    # Parts that fit so many processes, kept in the recipe: the run has the same numbers when fewer go on with it.
    recipe = recipe.replace(training=distributed.fit_micro_batch_size(recipe.training))
    with _stoppable(folder, distributed):
        prepared = _by_first(
            distributed, folder, lambda bars: prepare_run(recipe, folder, data, progress=bars, seconds=seconds)
        )
    with _locked(folder, distributed), _stoppable(folder, distributed):
        prepared = _made_ready(prepared, device, distributed, seconds=seconds)
        _run(prepared, device, distributed, asked, seconds=seconds)


def resume_run(folder: Path, device: "torch.device", *, distributed: "Distributed", asked: Beside) -> None:
    """Go on where the run stood, be it in the middle of its preparation."""
    from qkv.training import load_preparation_state, open_run, resume_preparation

    if not folder.is_dir():
        raise RunError(f"{folder}: there is no such run")
    with _locked(folder, distributed), _stoppable(folder, distributed):
        state, seconds = load_preparation_state(folder), None
        if not distributed.broadcast_from_rank0(lambda: state is not None):
            prepared = open_run(folder)
        else:
            if distributed.is_main_process:
                say(f"{folder}: the preparation was not finished; going on with it")
            prepared = _by_first(distributed, folder, lambda bars: resume_preparation(folder, progress=bars))
            given = distributed.broadcast_from_rank0(lambda: -1.0 if state is None or state.seconds is None else state.seconds)
            seconds = None if given < 0 else given
            prepared = _made_ready(prepared, device, distributed, seconds=seconds)
        _run(prepared, device, distributed, asked, seconds=seconds)


def _by_first(distributed: "Distributed", folder: Path, make: "Callable[[ProgressBars], PreparedRun]") -> "PreparedRun":
    """The first process makes the run ready; the others open what it made."""
    from qkv.training import open_shared_run

    prepared = None
    if distributed.is_main_process:
        with bars() as progress:
            prepared = make(progress)
    distributed.barrier()
    return open_shared_run(folder) if prepared is None else prepared


@contextmanager
def _locked(folder: Path, distributed: "Distributed") -> Iterator[None]:
    from qkv.training import RunFolder

    with RunFolder(folder).locked() if distributed.is_main_process else nullcontext():
        yield


@contextmanager
def _stoppable(folder: Path, distributed: "Distributed") -> Iterator[None]:
    """Where there is no step to finish, a signal ends the command at once; what is done so far stays."""
    from qkv.training import SignalInterrupt, raise_on_stop_signals

    try:
        with raise_on_stop_signals():
            yield
    except SignalInterrupt as stop:
        if distributed.is_main_process:
            say(f"stopped by {stop.signal.name}; go on: qkv train --resume {folder}")
        sys.exit(128 + stop.signal)


def estimate_run(
    recipe: "Recipe", vocab_size: int, device: "torch.device", *, distributed: "Distributed"
) -> "RunEstimate":  # fmt: skip
    """Say what the run will take."""
    from qkv.cost import Mode, Precision, estimate_run
    from qkv.cost.calibration import find_calibration
    from qkv.training import measure_matmul_flops
    from qkv.training.device_calibration import device_name
    from qkv.training.objectives import uses_bfloat16

    training = distributed.fit_micro_batch_size(recipe.training)
    dtype = Precision.MIXED if uses_bfloat16(training.precision, device) else Precision.FLOAT32
    plan = estimate_run(
        recipe.build_model_config(vocab_size),
        batch=training.micro_batch_size,
        length=training.seq_len,
        steps=training.steps,
        matmul_rate=measure_matmul_flops(device),
        accumulation=-(-training.batch_size // (training.micro_batch_size * distributed.world_size)),
        n_devices=distributed.world_size,
        sharding=distributed.sharding,
        checkpointing=training.activation_checkpointing,
        loss_chunk_size=training.loss_chunk_size,
        optimizer=training.optimizer,
        averaging=training.ema_decay is not None,
        predictions=None if recipe.masking is None else recipe.masking.max_masked_tokens(training.seq_len),
        dtype=dtype,
        backend="cuda" if device.type == "cuda" else "cpu",
        calibration=find_calibration(Mode.TRAIN, dtype, device=device_name(device)),
    )
    if distributed.is_main_process:
        say(plan.line)
    return plan


def dry_run_of(recipe: "Recipe", device: "torch.device", *, distributed: "Distributed", is_timed: bool) -> None:
    """`is_timed`: a run would find its own number of steps."""
    estimate_run(recipe, recipe.tokenizer.vocab_size, device, distributed=distributed)
    if is_timed and distributed.is_main_process:
        say(f"these are the recipe's {recipe.training.steps:,} steps: a run times how many fit in --minutes")


def _made_ready(
    prepared: "PreparedRun", device: "torch.device", distributed: "Distributed", *, seconds: float | None
) -> "PreparedRun":  # fmt: skip
    from qkv.training import finish_preparation, fit_run_to_time

    corpus = prepared.corpus
    if distributed.is_main_process:
        say(f"{prepared.run.path}: {corpus.summary}, vocabulary {corpus.tokenizer.vocab_size:,}")
        if prepared.data_warning:
            say(prepared.data_warning)
    # As in `start_run`, for a preparation that others take up: what is trained is what the recipe says.
    fitted = prepared.recipe.replace(training=distributed.fit_micro_batch_size(prepared.recipe.training))
    prepared = replace(prepared, recipe=fitted)
    if seconds is not None:
        prepared = fit_run_to_time(prepared, device=device, seconds=seconds, distributed=distributed)
    if distributed.is_main_process:
        finish_preparation(prepared)
    return prepared


def _run(prepared: "PreparedRun", device: "torch.device", distributed: "Distributed", asked: Beside, *, seconds: float | None) -> None:
    """All train; the first shows it, and what came of it. `seconds`: what the steps were just fitted to."""
    recipe = prepared.recipe
    plan = estimate_run(recipe, prepared.corpus.tokenizer.vocab_size, device, distributed=distributed)
    if asked.is_profiled:
        _profile(prepared, device, distributed, plan, trace=asked.trace)
    if not distributed.is_main_process:
        trainer = _trainer(prepared, device, distributed, lambda _entry: None)
        trainer.resume(lambda _said: None)
        stop = trainer.train(_pace(seconds, lambda _plan: None))
    else:
        from qkv.cli.training_progress import TrainingProgress, draw_curves, say_result, say_where
        from qkv.training import write_recipe

        def keep(training: "TrainingConfig") -> None:
            write_recipe(prepared.run, recipe.replace(training=training))
            progress.replan(training.steps)

        progress = TrainingProgress(plan)
        trainer = _trainer(prepared, device, distributed, progress.report)
        trainer.resume(say)
        say_where(trainer)
        with progress:
            stop = trainer.train(_pace(seconds, keep))
        draw_curves(trainer, tensorboard=asked.tensorboard)
        say_result(trainer, recipe.family, stop)
    if stop.signal is not None:
        sys.exit(128 + stop.signal)


def _trainer(prepared: "PreparedRun", device: "torch.device", distributed: "Distributed", report: "MetricsCallback") -> "Trainer":
    from qkv.training import build_trainer

    return build_trainer(prepared, device=device, report=report, start=_first_weights(prepared), distributed=distributed)


def _pace(seconds: float | None, keep: "Callable[[TrainingConfig], None]") -> "TimeBudget | None":
    """None where the steps are what they are."""
    from qkv.training import TimeBudget

    return None if seconds is None else TimeBudget(seconds, keep=keep)


def _profile(
    prepared: "PreparedRun", device: "torch.device", distributed: "Distributed", plan: "RunEstimate", *, trace: Path | None
) -> None:
    """A few steps of a throw-away model."""
    from qkv.cli.profile_report import show_profile
    from qkv.training import build_trainer
    from qkv.training.profiler import profile_training

    trainer = build_trainer(prepared, device=device, report=lambda _entry: None, distributed=distributed)
    profile = profile_training(trainer, plan.step, trace=trace if distributed.is_main_process else None)
    if distributed.is_main_process:
        training = prepared.recipe.training
        show_profile(profile, f"one step of {training.batch_size:,} × {training.seq_len:,} tokens")


def _first_weights(prepared: "PreparedRun") -> "Model | None":
    """What the run begins with; later its own checkpoints say."""
    start = prepared.recipe.init_from
    if start is None or prepared.run.checkpoint_steps():
        return None
    from qkv.tasks import load_pretrained

    model = load_pretrained(start).model
    if model.config.family != prepared.recipe.family:
        raise InputError(f"{start}: is a {model.config.family}, and the recipe trains a {prepared.recipe.family}")
    return model
