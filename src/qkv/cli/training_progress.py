"""Progress display and summary of a training run."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from qkv.cli.output import print_status
from qkv.cost.estimate import RunEstimate
from qkv.errors import QKVError
from qkv.training import Trainer
from qkv.training.distributed import StopRequest


class TrainingProgressDisplay:
    """A progress display with a status line that is updated on a terminal, and one printed line per evaluation.

    The run estimate passed to the constructor must include the device's matmul rate.
    """

    def __init__(self, estimate: RunEstimate) -> None:
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


def report_resumed_or_finished(trainer: Trainer) -> None:
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


def try_write_loss_plot_and_tensorboard(trainer: Trainer, *, tensorboard: bool) -> None:
    """Write the loss curve and, if requested, TensorBoard event files. Errors are printed but do not stop the run."""
    from qkv.data.file_io import convert_os_errors_to_disk_error
    from qkv.inspection.loss_curve import plot_loss_curve
    from qkv.inspection.tensorboard import rewrite_tensorboard_events

    path = trainer.run.path
    try:
        with convert_os_errors_to_disk_error(path / "loss.png", 0):
            plot_loss_curve(trainer.run.metrics).savefig(path / "loss.png")
            if tensorboard:
                rewrite_tensorboard_events(trainer.run.metrics, path / "tensorboard")
    except QKVError as error:
        print_status(str(error))


def print_training_summary(trainer: Trainer, family: str, stop: StopRequest) -> None:
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
