"""Prepare, profile and run the training of a model, and display its progress."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from qkv.choices import BackendName
from qkv.cli.output import check_trace_path, print_backend, print_profile, print_status, sequential_progress_bars
from qkv.cli.process import silence_profiler
from qkv.errors import InputError, QKVError, RunError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from qkv.config import Recipe, TrainingConfig
    from qkv.cost.estimate import RunEstimate
    from qkv.models import Model
    from qkv.training import Distributed, PreparedRun, TimeBudgetReplanner, Trainer
    from qkv.training.distributed import StopRequest
    from qkv.training.family import ProgressBars
    from qkv.training.loop import MetricsCallback


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a training run that do not change its recipe: additional output, and the backend."""

    tensorboard: bool = False
    profile: bool = False
    trace: Path | None = None
    backend: BackendName = BackendName.AUTO

    def check(self) -> None:
        """Check, before the run starts, that the trace path is valid and that required packages are installed."""
        if self.trace is not None:
            check_trace_path(self.trace)
        if self.tensorboard:
            from qkv.inspection.tensorboard import import_tensorboard

            import_tensorboard()

    @property
    def is_profiled(self) -> bool:
        return self.profile or self.trace is not None


def prepare_and_train_run(
    recipe: "Recipe",
    folder: Path,
    data: Path,
    *,
    device: "torch.device",
    distributed: "Distributed",
    minutes: float | None,
    options: RunOptions,
) -> None:
    """Prepare a new training run and train its model.

    If `minutes` is given, the number of steps is chosen to fit the time budget and is adjusted during the run.
    """
    from qkv.training import prepare_run

    seconds = None if minutes is None else 60 * minutes
    # The micro-batch size is adapted to the number of processes and saved in the recipe. The results therefore do not
    # change if the run is resumed with fewer processes.
    recipe = recipe.replace(training=distributed.shrink_micro_batch_to_fill_ranks(recipe.training))
    with _exit_on_signal(folder, distributed):
        prepared = _prepare_on_main_process(
            distributed, folder, lambda progress: prepare_run(recipe, folder, data, progress=progress, seconds=seconds)
        )
    with _lock_run_folder(folder, distributed), _exit_on_signal(folder, distributed):
        prepared = _fit_and_write_final_recipe(prepared, device, distributed, options, seconds=seconds)
        _train_prepared_run(prepared, device, distributed, options, seconds=seconds)


def resume_run(folder: Path, device: "torch.device", *, distributed: "Distributed", options: RunOptions) -> None:
    """Resume a training run, finishing its preparation first if necessary."""
    from qkv.training import load_preparation_inputs, open_run, resume_preparation

    if not folder.is_dir():
        raise RunError(f"{folder}: run folder not found")
    with _lock_run_folder(folder, distributed), _exit_on_signal(folder, distributed):
        state, seconds = load_preparation_inputs(folder), None
        if not distributed.broadcast_from_rank0(lambda: state is not None):
            prepared = open_run(folder)
        else:
            if distributed.is_main_process:
                print_status(f"{folder}: resuming the unfinished data preparation")
            prepared = _prepare_on_main_process(
                distributed, folder, lambda progress: resume_preparation(folder, progress=progress)
            )
            # Only numbers can be broadcast, so -1 represents None.
            budget = distributed.broadcast_from_rank0(
                lambda: -1.0 if state is None or state.seconds is None else state.seconds
            )
            seconds = None if budget < 0 else budget
            prepared = _fit_and_write_final_recipe(prepared, device, distributed, options, seconds=seconds)
        _train_prepared_run(prepared, device, distributed, options, seconds=seconds)


def _prepare_on_main_process(
    distributed: "Distributed", folder: Path, prepare: "Callable[[ProgressBars], PreparedRun]"
) -> "PreparedRun":
    """Prepare the run in the main process. The other processes wait until the run is prepared and then open it."""
    from qkv.training import open_shared_run

    prepared = None
    if distributed.is_main_process:
        with sequential_progress_bars() as progress:
            prepared = prepare(progress)
    distributed.barrier()
    return open_shared_run(folder) if prepared is None else prepared


@contextmanager
def _lock_run_folder(folder: Path, distributed: "Distributed") -> Iterator[None]:
    from qkv.training import RunFolder

    with RunFolder(folder).locked() if distributed.is_main_process else nullcontext():
        yield


@contextmanager
def _exit_on_signal(folder: Path, distributed: "Distributed") -> Iterator[None]:
    """Exit immediately if SIGINT or SIGTERM arrives outside of the training steps, and keep all completed work."""
    from qkv.training import SignalInterrupt, raise_on_stop_signals

    try:
        with raise_on_stop_signals():
            yield
    except SignalInterrupt as stop:
        if distributed.is_main_process:
            print_status(f"stopped by {stop.signal.name}; resume with: qkv train --resume {folder}")
        sys.exit(128 + stop.signal)


def estimate_and_print_run(
    recipe: "Recipe",
    vocab_size: int,
    device: "torch.device",
    *,
    distributed: "Distributed",
    backend: BackendName = BackendName.AUTO,
) -> "RunEstimate":
    """Estimate the time and memory of a run and print a summary."""
    from qkv.cost import Mode, Precision, estimate_run
    from qkv.cost.calibration import find_newest_calibration
    from qkv.training import measure_matmul_flops
    from qkv.training.objectives import uses_bfloat16
    from qkv.utils import gpu_name_or_cpu_threads

    config = recipe.build_model_config(vocab_size)
    training = distributed.shrink_micro_batch_to_fill_ranks(recipe.training)
    dtype = Precision.MIXED if uses_bfloat16(training.precision, device) else Precision.FLOAT32
    estimate = estimate_run(
        config,
        batch_size=training.micro_batch_size,
        seq_len=training.seq_len,
        steps=training.steps,
        matmul_rate=measure_matmul_flops(device),
        accumulation_steps=-(-training.batch_size // (training.micro_batch_size * distributed.world_size)),
        n_devices=distributed.world_size,
        sharding=distributed.sharding,
        activation_checkpointing=training.activation_checkpointing,
        loss_chunk_size=training.loss_chunk_size,
        optimizer=training.optimizer,
        ema=training.ema_decay is not None,
        logits_to_keep=None if recipe.masking is None else recipe.masking.max_masked_tokens(training.seq_len),
        dtype=dtype,
        device_type="cuda" if device.type == "cuda" else "cpu",
        calibration=find_newest_calibration(config, Mode.TRAIN, dtype, device=gpu_name_or_cpu_threads(device)),
        backend=backend,
    )
    if distributed.is_main_process:
        print_status(estimate.summary)
    return estimate


def print_dry_run(
    recipe: "Recipe", device: "torch.device", *, distributed: "Distributed", has_time_budget: bool, backend: BackendName
) -> None:
    """Print the estimate for a run. If there is a time budget, note that the number of steps is not final."""
    estimate_and_print_run(recipe, recipe.tokenizer.vocab_size, device, distributed=distributed, backend=backend)
    if has_time_budget and distributed.is_main_process:
        print_status(
            f"this estimate assumes {recipe.training.steps:,} steps; the run itself measures how many steps fit into "
            "--minutes"
        )


def _fit_and_write_final_recipe(
    prepared: "PreparedRun",
    device: "torch.device",
    distributed: "Distributed",
    options: RunOptions,
    *,
    seconds: float | None,
) -> "PreparedRun":
    """Fit the recipe to the number of processes and the time budget, and mark the preparation as finished."""
    from qkv.training import fit_run_to_time, write_fingerprints_and_final_recipe

    corpus = prepared.corpus
    if distributed.is_main_process:
        print_status(f"{prepared.run.path}: {corpus.summary}, vocabulary size {corpus.tokenizer.vocab_size:,}")
        if prepared.data_warning:
            print_status(prepared.data_warning)
    # `prepare_and_train_run` has already done this, but the number of processes may have changed since then.
    fitted = prepared.recipe.replace(training=distributed.shrink_micro_batch_to_fill_ranks(prepared.recipe.training))
    prepared = replace(prepared, recipe=fitted)
    if seconds is not None:
        prepared = fit_run_to_time(
            prepared, device=device, seconds=seconds, distributed=distributed, backend=options.backend
        )
    if distributed.is_main_process:
        write_fingerprints_and_final_recipe(prepared)
    return prepared


def _train_prepared_run(
    prepared: "PreparedRun",
    device: "torch.device",
    distributed: "Distributed",
    options: RunOptions,
    *,
    seconds: float | None,
) -> None:
    """Train the prepared run on all processes.

    Only the main process prints status messages. `seconds` is the time budget, or None.
    """
    recipe = prepared.recipe
    estimate = estimate_and_print_run(
        recipe, prepared.corpus.tokenizer.vocab_size, device, distributed=distributed, backend=options.backend
    )
    if options.is_profiled:
        _profile_training_steps(prepared, device, distributed, estimate, options)
    if not distributed.is_main_process:
        trainer = _load_init_model_and_build_trainer(prepared, device, distributed, options, lambda _entry: None)
        trainer.resume(lambda _message: None)
        stop = trainer.train(_create_time_budget(seconds, lambda _training: None))
    else:
        from qkv.training import write_recipe

        def save_new_plan(training: "TrainingConfig") -> None:
            write_recipe(prepared.run, recipe.replace(training=training))
            progress.print_and_set_total_steps(training.steps)

        progress = TrainingProgressDisplay(estimate)
        trainer = _load_init_model_and_build_trainer(prepared, device, distributed, options, progress.report)
        trainer.resume(print_status)
        report_resumed_or_finished(trainer)
        with progress:
            stop = trainer.train(_create_time_budget(seconds, save_new_plan))
        try_write_loss_plot_and_tensorboard(trainer, tensorboard=options.tensorboard)
        print_training_summary(trainer, recipe.family, stop)
    if stop.signal is not None:
        sys.exit(128 + stop.signal)


def _load_init_model_and_build_trainer(
    prepared: "PreparedRun",
    device: "torch.device",
    distributed: "Distributed",
    options: RunOptions,
    report: "MetricsCallback",
) -> "Trainer":
    from qkv.training import build_trainer

    initial_model = _load_init_model_unless_resumed(prepared)
    return build_trainer(
        prepared,
        device=device,
        report=report,
        start=initial_model,
        distributed=distributed,
        backend=options.backend,
    )


def _create_time_budget(
    seconds: float | None, on_replan: "Callable[[TrainingConfig], None]"
) -> "TimeBudgetReplanner | None":
    """Return the time budget, or None if the number of steps is fixed."""
    from qkv.training import TimeBudgetReplanner

    return None if seconds is None else TimeBudgetReplanner(seconds, on_replan=on_replan)


def _profile_training_steps(
    prepared: "PreparedRun",
    device: "torch.device",
    distributed: "Distributed",
    estimate: "RunEstimate",
    options: RunOptions,
) -> None:
    """Profile a few training steps of a temporary model and print the profile."""
    from qkv.engines import explain_training_backends
    from qkv.training import build_trainer
    from qkv.training.profiler import profile_training

    trainer = build_trainer(
        prepared, device=device, report=lambda _entry: None, distributed=distributed, backend=options.backend
    )
    silence_profiler()
    profile = profile_training(trainer, estimate.step, trace=options.trace if distributed.is_main_process else None)
    if distributed.is_main_process:
        training = prepared.recipe.training
        print_profile(profile, f"one step of {training.batch_size:,} × {training.seq_len:,} tokens")
        print_backend(*explain_training_backends(trainer.model, trainer.config, options.backend))


def _load_init_model_unless_resumed(prepared: "PreparedRun") -> "Model | None":
    """Load the model named by `init_from`. Return None if it is not set or if the run already has a checkpoint."""
    init_from = prepared.recipe.init_from
    if init_from is None or prepared.run.checkpoint_steps():
        return None
    from qkv.tasks import load_pretrained

    model = load_pretrained(init_from).model
    if model.config.family != prepared.recipe.family:
        raise InputError(
            f"{init_from}: family must be {prepared.recipe.family}, as in the recipe, got {model.config.family}"
        )
    return model


class TrainingProgressDisplay:
    """A progress display with a status line that is updated on a terminal, and one printed line per evaluation.

    The run estimate passed to the constructor must include the device's matmul rate.
    """

    def __init__(self, estimate: "RunEstimate") -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        assert estimate.matmul_rate is not None
        self._total_steps = estimate.steps
        self._ideal_step_seconds = estimate.flops / estimate.steps / estimate.matmul_rate
        """Duration of a training step at the full matmul rate, in seconds."""
        self._console = Console(stderr=True)
        self._live = Live(Text(), console=self._console, transient=True, refresh_per_second=4)
        self._first: tuple[int, int, float] | None = None
        """Step, tokens and seconds of the first metrics entry, from which throughput is measured."""
        self._last: Mapping[str, Any] = {}

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def report(self, entry: Mapping[str, Any]) -> None:
        """Display a metrics entry from the trainer."""
        if "validation_loss" in entry:
            self._print_evaluation(entry)
            return
        if self._first is None:
            self._first = (entry["step"], entry["tokens"], entry["seconds"])
        self._last = entry
        if self._console.is_terminal:
            from rich.text import Text

            line = f"step {entry['step']:,}/{self._total_steps:,}  loss {entry['loss']:.4f}"
            line += f"  {self._format_throughput_and_eta()}"
            self._live.update(Text(line))

    def print_and_set_total_steps(self, steps: int) -> None:
        """Print and store a new total number of steps."""
        self._console.print(
            f"at the current throughput, {steps:,} steps fit into the time budget (planned: {self._total_steps:,})",
            highlight=False,
        )
        self._total_steps = steps

    def _print_evaluation(self, entry: Mapping[str, Any]) -> None:
        best = " (best so far)" if entry["is_best"] else ""
        other_metrics = [
            f"{name.removeprefix('validation_').replace('_', ' ')} {value:.4g}"
            for name, value in entry.items()
            if isinstance(value, float) and name != "validation_loss"
        ]
        loss = f"step {entry['step']:,}: validation loss {entry['validation_loss']:.4f}{best}"
        lines = [
            f"{', '.join([loss, *other_metrics])}  {self._format_throughput_and_eta()}".rstrip(),
            *entry.get("samples", []),
        ]
        self._console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)

    def _format_throughput_and_eta(self) -> str:
        """Format the throughput, the fraction of the matmul rate and the remaining time."""
        if self._first is None or not self._last or self._last["step"] == self._first[0]:
            return ""
        first_step, first_tokens, first_seconds = self._first
        elapsed = max(1e-9, self._last["seconds"] - first_seconds)
        n_steps = self._last["step"] - first_step
        remaining = (self._total_steps - self._last["step"]) * elapsed / n_steps
        utilization = n_steps * self._ideal_step_seconds / elapsed
        tokens_per_second = (self._last["tokens"] - first_tokens) / elapsed
        return f"{tokens_per_second:,.0f} tokens/s  {utilization:.0%} of peak  {_format_clock(remaining)} left"


def _format_clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def report_resumed_or_finished(trainer: "Trainer") -> None:
    """Print the step from which a resumed run continues, or that the run has already finished.

    Print nothing for a new run.
    """
    step, steps = trainer.progress.step, trainer.config.steps
    if step >= steps:
        print_status(
            f"all {step:,} steps are complete. To train longer, increase training.steps in "
            f"{trainer.run.path}/recipe.toml and resume the run"
        )
    elif step:
        print_status(f"resuming at step {step:,} of {steps:,}")


def try_write_loss_plot_and_tensorboard(trainer: "Trainer", *, tensorboard: bool) -> None:
    """Write the loss curve and, if requested, TensorBoard event files. Errors are printed but do not stop the run."""
    from qkv.data.file_io import convert_os_errors_to_disk_error
    from qkv.inspection.figures import plot_loss_curve
    from qkv.inspection.tensorboard import rewrite_tensorboard_events

    path = trainer.run.path
    try:
        with convert_os_errors_to_disk_error(path / "loss.png", 0):
            plot_loss_curve(trainer.run.metrics).savefig(path / "loss.png")
            if tensorboard:
                rewrite_tensorboard_events(trainer.run.metrics, path / "tensorboard")
    except QKVError as error:
        print_status(str(error))


def print_training_summary(trainer: "Trainer", family: str, stop: "StopRequest") -> None:
    """Print the result of a run, and explain how to use or resume the run."""
    path, progress = trainer.run.path, trainer.progress
    best = ""
    if progress.best_loss is not None:
        best = f"; best validation loss {progress.best_loss:.4f} at step {progress.best_step}"
    print(f"{path}: {progress.step:,} steps, {progress.n_tokens:,} tokens, {progress.seconds:.0f} s{best}")
    if stop.signal is not None:
        print_status(f"stopped by {stop.signal.name} at step {progress.step:,}; resume with: qkv train --resume {path}")
        return
    examples = {"gpt": ("generate", "Once upon a time"), "bert": ("fill", "A day in the [MASK].")}
    command, text = examples.get(family, ("translate", "…"))
    print_status(f'try it with: qkv {command} {path} "{text}"')
