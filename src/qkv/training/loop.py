"""Training loop with gradient steps, evaluation, checkpoints and handling of stop signals."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from qkv.data import prefetch
from qkv.errors import ConfigError, InputError, TrainingError
from qkv.training.checkpoint import RunFolder, TrainingProgress, describe_environment, load_progress
from qkv.training.distributed import SINGLE_PROCESS, Distributed, StopRequest, record_stop_signals
from qkv.training.family import TrainingData
from qkv.training.objectives import Objective, TrainingBatch
from qkv.training.optimizer import EMA, TrainingState, learning_rate
from qkv.training.recipe_selection import TimeBudgetReplanner
from qkv.training.step import StepError, StepResult, TrainStep, describe_nonfinite_weight

MetricsCallback = Callable[[Mapping[str, Any]], None]
"""Callback that receives each entry written to metrics.jsonl, for example to update a progress bar."""


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The summed loss over the evaluated targets and, if known, the number of text bytes that they represent."""

    loss_sum: float
    n_targets: int
    n_bytes: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Additional metrics from the objective, keyed by name."""

    @property
    def loss(self) -> float:
        """Mean loss in nats per target."""
        return self.loss_sum / self.n_targets

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float | None:
        return None if self.n_bytes is None else self.loss_sum / math.log(2) / self.n_bytes


@torch.no_grad()
def evaluate(
    model: nn.Module,
    objective: Objective,
    batches: Iterable[TrainingBatch],
    *,
    distributed: Distributed = SINGLE_PROCESS,
) -> EvaluationResult:
    """Evaluate the model on all batches without computing gradients.

    Losses and metrics are summed over all batches and divided by the total counts because averaging the batch averages
    would give too much weight to small batches. The ranks of `distributed` share the batches.
    """
    was_training = model.training
    model.eval()
    sums: dict[str, tuple[float, float]] = {"": (0.0, 0.0)}
    try:
        for batch, counts in distributed.shard_with_uncounted_repeats(batches):
            output = objective(batch)
            batch_sums = {"": (float(output.loss), float(batch.n_targets))}
            batch_sums |= {name: (float(metric.total), float(metric.count)) for name, metric in output.metrics.items()}
            for name, (total, count) in batch_sums.items():
                previous = sums.get(name, (0.0, 0.0))
                sums[name] = (previous[0] + total, previous[1] + count) if counts else previous
    finally:
        model.train(was_training)
    totals = distributed.all_reduce_sum(torch.tensor(list(sums.values()), dtype=torch.float64)).tolist()
    (loss_sum, n_targets), *metric_totals = totals
    metrics = {
        name: total / max(count, 1.0) for name, (total, count) in zip(list(sums)[1:], metric_totals, strict=True)
    }
    return EvaluationResult(loss_sum=loss_sum, n_targets=max(1, int(n_targets)), metrics=metrics)


class EvaluationInterrupt(Exception):  # noqa: N818 - control flow, not an error
    """Raised when a stop signal interrupts an evaluation. The partial sums are discarded."""


def until_stopped(is_stopped: Callable[[], bool], batches: Iterable[TrainingBatch]) -> Iterator[TrainingBatch]:
    """Yield the batches and raise `EvaluationInterrupt` as soon as `is_stopped()` returns True."""
    for batch in batches:
        if is_stopped():
            raise EvaluationInterrupt
        yield batch


def update_progress_after_evaluation(
    progress: TrainingProgress, result: EvaluationResult, *, best_metric: str | None
) -> TrainingProgress:
    """Return the updated training progress after an evaluation.

    The progress records either a new best result or one more evaluation without improvement.
    """
    metric = select_metric(best_metric, result.metrics)
    if not is_improvement(result.loss, progress.best_loss, metric=metric, best_metric_value=progress.best_metric_value):
        return replace(progress, last_eval_step=progress.step, n_evals_since_best=progress.n_evals_since_best + 1)
    return replace(
        progress,
        last_eval_step=progress.step,
        best_loss=result.loss,
        best_metric_value=metric,
        best_step=progress.step,
        n_evals_since_best=0,
    )


def select_metric(best_metric: str | None, metrics: Mapping[str, float]) -> float | None:
    """Return the value of the metric that determines the best checkpoint, or None if the loss determines it."""
    if best_metric is None:
        return None
    if best_metric not in metrics:
        raise ConfigError(
            f"best_metric must be one of the metrics of this run ({', '.join(metrics) or 'none'}), got {best_metric!r}"
        )
    return metrics[best_metric]


def is_improvement(
    loss: float, best_loss: float | None, *, metric: float | None, best_metric_value: float | None
) -> bool:
    """Return True if a result is better than the best one so far.

    Results are compared by the metric. If there is no metric or the values are equal, they are compared by the loss.
    """
    if best_loss is None:
        return True
    if metric is not None and best_metric_value is not None and metric != best_metric_value:
        return metric > best_metric_value
    return loss < best_loss


class Trainer:
    """A trainer for one model in one run folder.

    Batches, dropout and the learning rate depend only on the config, the data and the step, so a resumed run gives the
    same results as an uninterrupted run.
    """

    def __init__(
        self,
        train_step: TrainStep,
        *,
        data: TrainingData,
        run: RunFolder,
        texts: Mapping[str, str],
        report: MetricsCallback = lambda _entry: None,
        generation_metrics: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """Initialize the trainer.

        `texts` maps file names such as config.json to contents that are saved with the weights in each checkpoint.
        `generation_metrics` returns additional evaluation metrics, such as the BLEU score of generated translations.
        """
        self.train_step = train_step
        self.model, self.config, self.distributed = train_step.model, train_step.config, train_step.distributed
        self.data = data
        self.run = run
        self.texts = texts
        self.report, self.generation_metrics = report, generation_metrics
        self.ema = None if self.config.ema_decay is None else EMA(self.model, self.config.ema_decay)
        environment = describe_environment(next(self.model.parameters()).device)
        self.progress = TrainingProgress(environment=environment + self.distributed.environment_suffix)
        self._saved_step: int | None = None
        self._pending: tuple[StepResult, float, TrainingProgress] | None = None

    def train(self, time_budget: TimeBudgetReplanner | None = None) -> StopRequest:
        """Train until the last step, early stopping or a stop signal, and save a checkpoint at the end.

        If `time_budget` is given, the number of steps is recalculated when the throughput changes during the run.
        """
        self.model.train()
        self._check_weights_finite()
        with (
            self.train_step.modules,
            record_stop_signals() as stop,
            closing(prefetch(lambda t: self.train_step.load(self.data.batch(t)), self.progress.step)) as batches,
        ):
            while True:
                self._evaluate_if_due(stop)
                new_config = (
                    None if time_budget is None else time_budget.replan(self.config, self.progress, self.distributed)
                )
                self._save_if_due(
                    force=new_config is not None
                    or self.distributed.synchronize_stop_request(stop) is not None
                    or self._is_done
                )
                if time_budget is not None and new_config is not None:
                    time_budget.on_replan(new_config)
                    self.config = new_config
                # A signal may have arrived after `force` was evaluated. The run ends at this step only if the step was
                # saved.
                is_saved = self._saved_step == self.progress.step
                if is_saved and (self._is_done or self.distributed.synchronize_stop_request(stop) is not None):
                    return stop
                self.run_step(next(batches))

    def resume(self, log: Callable[[str], None]) -> None:
        """Restore the latest valid checkpoint.

        If the run was interrupted before its first checkpoint, it starts over.
        """
        step = self.distributed.broadcast_from_rank0(
            lambda: self.run.latest_valid_checkpoint(log)[0].step if self.run.checkpoint_steps() else -1
        )
        if step >= 0:
            folder = self.run.checkpoint_folder(int(step))
            progress = load_progress(folder, int(step))
            self._training_state().restore(folder)
            environment = self.progress.environment
            if progress.environment != environment:
                log(
                    f"the run was trained with {progress.environment}, but continues with {environment}; results may "
                    "differ by rounding"
                )
            self.progress, self._saved_step = progress, progress.step
        if self.distributed.is_main_process:
            self.run.discard_later_checkpoints_and_metrics(self.progress, log)
            self.run.delete_old_checkpoints(keep=self.config.keep_checkpoints, best=self.progress.best_step)
        self.distributed.barrier()

    @property
    def _is_done(self) -> bool:
        patience = self.config.patience
        return self.progress.step >= self.config.steps or (
            patience is not None and self.progress.n_evals_since_best >= patience
        )

    def run_step(self, batch: TrainingBatch) -> None:
        """Train on one batch, and log its metrics as soon as they are known."""
        started = time.perf_counter()
        result, rate = self._update_weights(batch, self.progress.step)
        self.flush_metrics()
        self.progress = replace(
            self.progress,
            step=self.progress.step + 1,
            n_tokens=self.progress.n_tokens + batch.n_tokens,
            seconds=self.progress.seconds + time.perf_counter() - started,
        )
        self._pending = result, rate, self.progress
        if result.is_ready:
            self.flush_metrics()

    def _update_weights(self, batch: TrainingBatch, step: int) -> tuple[StepResult, float]:
        """Run a training step, and return its result and the learning rate."""
        rate = learning_rate(self.config, step)
        with self._wrap_step_errors():
            result = self.train_step(batch, step, learning_rate=rate)
        if self.ema is not None:
            self.ema.update(self.progress.step)
        return result, rate

    def flush_metrics(self) -> None:
        """Read and log the metrics of the last step if they are still pending."""
        if self._pending is None:
            return
        (result, rate, progress), self._pending = self._pending, None
        with self._wrap_step_errors():
            metrics = result.read()
        counters = {"learning_rate": rate, "tokens": progress.n_tokens, "seconds": round(progress.seconds, 4)}
        self._log_entry({"step": progress.step, **metrics.to_log_entry(), **counters})

    @contextmanager
    def _wrap_step_errors(self) -> Iterator[None]:
        try:
            yield
        except StepError as error:
            raise self._training_error(str(error), step=error.step) from None
        except InputError as error:
            raise self._training_error(f"{error}, in a batch of {self.run.path}") from None

    def train_and_measure_step_seconds(
        self, n_batches: int = 9, *, clock: Callable[[], float] = time.perf_counter
    ) -> float:
        """Run training steps on the first `n_batches` batches and return the median time per step.

        The steps train the model, so use a trainer that was created for this purpose. Each batch runs twice. Only the
        second run is timed because the first run also compiles, allocates memory and selects GPU kernels for the shape
        of the batch. The median is robust against short interruptions by other processes.
        """
        self.model.train()
        seconds = []
        with self.train_step.modules:
            for step in (*range(n_batches), *range(n_batches)):
                started = clock()
                result, _ = self._update_weights(self.train_step.load(self.data.batch(step)), step)
                with self._wrap_step_errors():
                    result.read()
                seconds.append(clock() - started)
        return self.distributed.broadcast_from_rank0(lambda: statistics.median(seconds[n_batches:]))

    def _evaluate_if_due(self, stop: StopRequest) -> None:
        progress = self.progress
        is_due = progress.step > 0 and (progress.step % self.config.eval_every == 0 or self._is_done)
        if self.data.validation is None or not is_due or progress.last_eval_step == progress.step:
            return
        self.flush_metrics()
        patience = self.config.patience
        # A stop signal may interrupt an evaluation because the resumed run repeats it. An evaluation that can end the
        # run is always finished.
        may_end_run = self._is_done or (patience is not None and progress.n_evals_since_best + 1 >= patience)
        try:
            with nullcontext() if self.ema is None else self.ema.apply_to_model():
                batches = self.data.validation()
                if not may_end_run:
                    batches = until_stopped(
                        lambda: self.distributed.synchronize_stop_request(stop) is not None, batches
                    )
                result = evaluate(self.model, self.train_step.objective, batches, distributed=self.distributed)
                self.model.eval()
                extra_metrics = self.generation_metrics()
                self.model.train()
        except EvaluationInterrupt:
            return
        if not math.isfinite(result.loss):
            raise self._training_error(f"validation loss {result.loss} is not finite", consequence="nothing was saved")
        self.progress = update_progress_after_evaluation(progress, result, best_metric=self.config.best_metric)
        metrics = {f"validation_{name}": value for name, value in result.metrics.items()}
        is_best = self.progress.best_step == progress.step
        self._log_entry(
            {"step": progress.step, "validation_loss": result.loss, **metrics, **extra_metrics, "is_best": is_best}
        )

    def _save_if_due(self, *, force: bool) -> None:
        progress, step = self.progress, self.progress.step
        is_due = step > 0 and (step % self.config.save_every == 0 or progress.best_step == step)
        if not (is_due or force) or self._saved_step == step:
            return
        self.flush_metrics()
        self._check_weights_finite()
        progress = self.progress = replace(progress, metrics_bytes=self.run.metrics_bytes())
        self.distributed.save_checkpoint(
            self.run, progress, tensors=self._training_state().tensors_by_checkpoint_file(), texts=self.texts
        )
        self._saved_step = step
        if self.distributed.is_main_process:
            self.run.delete_old_checkpoints(keep=self.config.keep_checkpoints, best=progress.best_step)

    def _log_entry(self, entry: Mapping[str, Any]) -> None:
        if self.distributed.is_main_process:
            self.run.log(entry)
            self.report(entry)

    def _training_state(self) -> TrainingState:
        return TrainingState(
            self.model, self.train_step.optimizers, ema=self.ema, is_lora=self.config.lora_rank is not None
        )

    def _check_weights_finite(self) -> None:
        """Raise `TrainingError` if a weight is not finite, so that non-finite weights are never saved."""
        if (culprit := describe_nonfinite_weight(self.model)) is not None:
            raise self._training_error(f"{culprit} is not finite", consequence="nothing was saved")

    def _training_error(
        self, reason: str, *, consequence: str = "no update was applied", step: int | None = None
    ) -> TrainingError:
        saved_steps = self.run.checkpoint_steps()
        last = f"the checkpoint of step {saved_steps[-1]} is intact" if saved_steps else "there is no checkpoint yet"
        return TrainingError(f"step {self.progress.step if step is None else step}: {reason}; {consequence}, {last}")
