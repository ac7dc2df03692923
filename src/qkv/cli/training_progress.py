"""A run as it goes: where it begins, loss, tokens a second, share of the machine, time left, what came of it."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from qkv.cli.progress import say
from qkv.cost.run_estimate import RunEstimate
from qkv.errors import QKVError
from qkv.training import Trainer
from qkv.training.signals import StopRequest


class TrainingProgress:
    """On a terminal one line that changes; in a pipe a line an evaluation. The plan must know the device's rate."""

    def __init__(self, plan: RunEstimate) -> None:
        assert plan.matmul_rate is not None
        self._steps = plan.steps
        self._at_best = plan.flops / plan.steps / plan.matmul_rate
        """Seconds a step would take at the full rate."""
        self._console = Console(stderr=True)
        self._live = Live(Text(), console=self._console, transient=True, refresh_per_second=4)
        self._first: tuple[int, int, float] | None = None
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
        if "validation_loss" in entry:
            self._say_evaluation(entry)
            return
        if self._first is None:
            self._first = (entry["step"], entry["tokens"], entry["seconds"])
        self._last = entry
        if self._console.is_terminal:
            self._live.update(
                Text(f"step {entry['step']:,}/{self._steps:,}  loss {entry['loss']:.4f}  {self._speed()}")
            )

    def replan(self, steps: int) -> None:
        """The last step has moved."""
        self._console.print(f"at this pace {steps:,} steps fit; {self._steps:,} were planned", highlight=False)
        self._steps = steps

    def _say_evaluation(self, entry: Mapping[str, Any]) -> None:
        best = " (best so far)" if entry["is_best"] else ""
        further = [
            f"{name.removeprefix('validation_').replace('_', ' ')} {value:.4g}"
            for name, value in entry.items()
            if isinstance(value, float) and name != "validation_loss"
        ]
        line = ", ".join([f"step {entry['step']:,}: validation loss {entry['validation_loss']:.4f}{best}", *further])
        lines = [f"{line}  {self._speed()}".rstrip(), *entry.get("samples", [])]
        self._console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)

    def _speed(self) -> str:
        if self._first is None or not self._last or self._last["step"] == self._first[0]:
            return ""
        step, tokens, seconds = self._first
        elapsed = max(1e-9, self._last["seconds"] - seconds)
        n_steps = self._last["step"] - step
        left = (self._steps - self._last["step"]) * elapsed / n_steps
        share = n_steps * self._at_best / elapsed
        return f"{(self._last['tokens'] - tokens) / elapsed:,.0f} tokens/s  {share:.0%} of peak  {_clock(left)} left"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def say_where(trainer: Trainer) -> None:
    """If it does not begin at the beginning."""
    step, steps = trainer.progress.step, trainer.config.steps
    if step >= steps:
        say(f"all {step:,} steps are done; for more raise training.steps in {trainer.run.path}/recipe.toml and resume")
    elif step:
        say(f"going on at step {step:,} of {steps:,}")


def draw_curves(trainer: Trainer, *, tensorboard: bool) -> None:
    """A disk that refuses them, or a missing package, is said and ends nothing."""
    from qkv.data.file_io import convert_disk_errors
    from qkv.inspection.loss_curve import plot_loss_curve
    from qkv.inspection.tensorboard import write_tensorboard_events

    path = trainer.run.path
    try:
        with convert_disk_errors(path / "loss.png", 0):
            plot_loss_curve(trainer.run.metrics).savefig(path / "loss.png")
            if tensorboard:
                write_tensorboard_events(trainer.run.metrics, path / "tensorboard")
    except QKVError as error:
        say(str(error))


def say_result(trainer: Trainer, family: str, stop: StopRequest) -> None:
    path, progress = trainer.run.path, trainer.progress
    best = (
        ""
        if progress.best_loss is None
        else f"; best validation loss {progress.best_loss:.4f} at step {progress.best_step}"
    )
    print(f"{path}: {progress.step:,} steps, {progress.n_tokens:,} tokens, {progress.seconds:.0f} s{best}")
    if stop.signal is not None:
        say(f"stopped by {stop.signal.name} at step {progress.step:,}; go on: qkv train --resume {path}")
        return
    tries = {"gpt": ("generate", "Once upon a time"), "bert": ("fill", "A day in the [MASK].")}
    verb, text = tries.get(family, ("translate", "…"))
    say(f'try it: qkv {verb} {path} "{text}"')
