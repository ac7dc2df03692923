"""Training loop with gradient steps, evaluation, checkpoints and handling of stop signals."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from qkv.accel.cpu.onednn_linear import use_onednn_if_supported
from qkv.accel.cuda.graph_step import CUDAGraphStep, can_capture
from qkv.config import TrainingConfig
from qkv.data import prefetch
from qkv.errors import InputError, TrainingError
from qkv.training.async_metrics import PendingMetrics, StepMetrics, StepOutput, copy_to_host_async, pin_batch
from qkv.training.distributed import SINGLE_PROCESS, Distributed, IsCounted
from qkv.training.ema import EMA
from qkv.training.evaluation import EvaluationInterrupt, evaluate, until_stopped, update_progress_after_evaluation
from qkv.training.family import TrainingData
from qkv.training.finite_check import describe_first_nonfinite_tensor, describe_nonfinite_weight
from qkv.training.gradient_accumulation import accumulate_gradients
from qkv.training.objectives import DeviceInputs, LossOutput, Objective, SplitObjective, TrainingBatch
from qkv.training.optimizer import build_optimizers, clip_gradients, set_learning_rate, skip_step_if
from qkv.training.run_folder import RunFolder, TrainingProgress, describe_environment, load_progress
from qkv.training.schedule import learning_rate
from qkv.training.sharded_tensors import is_sharded
from qkv.training.signals import StopRequest, record_stop_signals
from qkv.training.time_budget import TimeBudgetReplanner
from qkv.training.timer import retain_freed_memory
from qkv.training.training_state import TrainingState

MetricsCallback = Callable[[Mapping[str, Any]], None]
"""Callback that receives each entry written to metrics.jsonl, for example to update a progress bar."""


class Trainer:
    """A trainer for one model in one run folder.

    Batches, dropout and the learning rate depend only on the config, the data and the step, so a resumed run gives the
    same results as an uninterrupted run.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainingConfig,
        *,
        objective: Objective,
        data: TrainingData,
        run: RunFolder,
        texts: Mapping[str, str],
        report: MetricsCallback = lambda _entry: None,
        generation_metrics: Callable[[], Mapping[str, Any]] = dict,
        distributed: Distributed = SINGLE_PROCESS,
    ) -> None:
        """Initialize the trainer.

        `texts` maps file names such as config.json to contents that are saved with the weights in each checkpoint.
        `generation_metrics` returns additional evaluation metrics, such as the BLEU score of generated translations.
        `distributed` is the context of the processes that share the work (default: a single process).
        """
        self.distributed = distributed
        self.model = model
        self.config = config
        self.objective = distributed.wrap_objective(model, use_onednn_if_supported(model, objective, config))
        self.data = data
        self.run = run
        self.texts = texts
        self.report, self.generation_metrics = report, generation_metrics
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._device = self._parameters[0].device
        if self._device.type == "cpu":
            retain_freed_memory()  # makes a step of GPT-2 124M about 12 % faster without changing the results
        self.progress = TrainingProgress(
            environment=describe_environment(self._device) + distributed.environment_suffix
        )
        self._saved_step: int | None = None
        self._graph_step: CUDAGraphStep[StepOutput] | None = (
            CUDAGraphStep() if can_capture(self.objective, config, self._device) else None
        )
        self.optimizers = build_optimizers(model, config, capturable=self._graph_step is not None)
        self.ema = None if config.ema_decay is None else EMA(model, config.ema_decay)
        # If metrics are read one step late, the device must skip updates after a non-finite loss. AdamW in torch does
        # not support skipping for sharded tensors.
        self._async_metrics = self._device.type == "cuda" and not any(is_sharded(p) for p in self._parameters)
        self._found_nonfinite = torch.zeros((), device=self._device)
        """Tensor that is set to 1 at the first non-finite loss. The device then skips all later updates, although the
        host reads the loss one step later."""
        self._pending: tuple[PendingMetrics, float, TrainingProgress] | None = None

    def train(self, time_budget: TimeBudgetReplanner | None = None) -> StopRequest:
        """Train until the last step, early stopping or a stop signal, and save a checkpoint at the end.

        If `time_budget` is given, the number of steps is recalculated when the throughput changes during the run.
        """
        self.model.train()
        self._check_weights_finite()
        with record_stop_signals() as stop, closing(prefetch(self._load_batch, self.progress.step)) as batches:
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
                self._run_step(next(batches))

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

    def _load_batch(self, t: int) -> TrainingBatch:
        batch = self.data.batch(t)
        return pin_batch(batch) if self._device.type == "cuda" else batch

    def _run_step(self, batch: TrainingBatch) -> None:
        started = time.perf_counter()
        step = self.progress.step
        rate = learning_rate(self.config, step)
        pending = self._train_on(batch, step, rate)
        self.flush_metrics()
        n_tokens = self.progress.n_tokens + batch.n_tokens
        seconds = self.progress.seconds + time.perf_counter() - started
        self.progress = replace(self.progress, step=step + 1, n_tokens=n_tokens, seconds=seconds)
        self._pending = pending, rate, self.progress
        if not self._async_metrics:
            self.flush_metrics()

    def flush_metrics(self) -> None:
        """Read and log the metrics of the last step if they are still pending."""
        if self._pending is None:
            return
        (pending, rate, progress), self._pending = self._pending, None
        counters = {"learning_rate": rate, "tokens": progress.n_tokens, "seconds": round(progress.seconds, 4)}
        self._log_entry(
            {"step": progress.step, **self._read_metrics_or_raise_nonfinite(pending).to_log_entry(), **counters}
        )

    def _read_metrics_or_raise_nonfinite(self, pending: PendingMetrics) -> StepMetrics:
        """Wait for the metrics of a step.

        Raises `TrainingError` if the loss or the gradient norm is not finite.
        """
        metrics = pending.read()
        if math.isfinite(metrics.loss) and math.isfinite(metrics.grad_norm):
            return metrics
        batch, step = pending.batch, pending.step
        if self._async_metrics:
            # Recompute the gradients, which were freed by the update. The weights are still those of this step because
            # the device skipped all later updates.
            self._compute_gradients(batch, step)
        culprit = describe_first_nonfinite_tensor(
            self.model, lambda: (output.loss for output, _ in self._micro_batch_losses(batch, step))
        )
        # Non-finite gradients spread to all ranks. The rank whose micro-batch caused them finds an earlier non-finite
        # tensor.
        culprit = next((name for name in self.distributed.all_gather_str(culprit) if "gradient" not in name), culprit)
        raise self._training_error(f"loss {metrics.loss}: {culprit} is not finite", step=step)

    def _train_on(self, batch: TrainingBatch, step: int, rate: float) -> PendingMetrics:
        """Compute the gradients of a batch and apply the update, either eagerly or by replaying a CUDA graph."""
        if batch.n_targets == 0:
            raise self._training_error("a batch must have at least 1 target, got 0")
        for optimizer in self.optimizers:
            set_learning_rate(optimizer, rate)
        if self._graph_step is None:
            pending = self._compute_gradients(batch, step)
            if not self._async_metrics:
                # Check the loss and the gradient norm before the update so that non-finite values do not change the
                # weights.
                self._read_metrics_or_raise_nonfinite(pending)
            self._clip_step_and_zero_grad(pending.output)
        else:
            pending = self._train_with_graph(batch, step, self._graph_step)
        if self.ema is not None:
            self.ema.update(self.progress.step)
        return pending

    def _compute_gradients(self, batch: TrainingBatch, step: int) -> PendingMetrics:
        """Accumulate the gradients of the batch in the model without synchronizing with the device."""
        return copy_to_host_async(
            self._accumulate_and_flag_nonfinite(self._micro_batch_losses(batch, step), batch.n_targets), batch, step
        )

    def _train_with_graph(
        self, batch: TrainingBatch, step: int, graph_step: CUDAGraphStep[StepOutput]
    ) -> PendingMetrics:
        """Compute the gradients and apply the update with a CUDA graph.

        The graph is captured once the input shapes repeat.
        """
        objective = self.objective
        assert isinstance(objective, SplitObjective)
        self._set_seed(step)
        with self._wrap_input_errors():
            tensors = objective.to_device(batch)

        def step_function(device_inputs: DeviceInputs) -> StepOutput:
            *inputs, n_targets = device_inputs
            assert n_targets is not None
            output = self._accumulate_and_flag_nonfinite([(objective.loss(*inputs), True)], n_targets)
            self._clip_step_and_zero_grad(output)
            return output

        n_targets = torch.full((), float(batch.n_targets), device=self._device)
        return copy_to_host_async(graph_step((*tensors, n_targets), step_function), batch, step)

    def _accumulate_and_flag_nonfinite(
        self, outputs: Iterable[tuple[LossOutput, IsCounted]], n_targets: int | Tensor
    ) -> StepOutput:
        output = accumulate_gradients(outputs, n_targets, parameters=self._parameters, distributed=self.distributed)
        if self._async_metrics:
            torch.maximum(
                self._found_nonfinite,
                output.values[:2].isfinite().all().logical_not().float(),
                out=self._found_nonfinite,
            )
        return output

    def _micro_batch_losses(self, batch: TrainingBatch, step: int) -> Iterator[tuple[LossOutput, IsCounted]]:
        """Yield the loss of each of this rank's micro-batches with a flag that is True if the micro-batch counts."""
        for (i, micro_batch), counts in self.distributed.shard_with_uncounted_repeats(
            enumerate(batch.split(self.config.micro_batch_size))
        ):
            self._set_seed(step, micro_batch=i)
            with self._wrap_input_errors():
                output = self.objective(micro_batch)
            yield output, counts

    def _set_seed(self, step: int, *, micro_batch: int = 0) -> None:
        """Seed dropout from (seed, step, micro-batch) so that checkpoints do not need to store the random state."""
        torch.manual_seed((self.config.seed * 1_000_003 + step) * 1_009 + micro_batch)

    @contextmanager
    def _wrap_input_errors(self) -> Iterator[None]:
        try:
            yield
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
        for step in (*range(n_batches), *range(n_batches)):
            started = clock()
            self._read_metrics_or_raise_nonfinite(
                self._train_on(self._load_batch(step), step, learning_rate(self.config, step))
            )
            seconds.append(clock() - started)
        return self.distributed.broadcast_from_rank0(lambda: statistics.median(seconds[n_batches:]))

    def _clip_step_and_zero_grad(self, output: StepOutput) -> None:
        for optimizer in self.optimizers:
            if self.config.max_grad_norm is not None:
                clip_gradients(
                    optimizer, output.grad_norm, self.config.max_grad_norm, fuse_into_step=self._graph_step is not None
                )
            if self._async_metrics:
                skip_step_if(self._found_nonfinite, optimizer)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

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
                result = evaluate(self.model, self.objective, batches, distributed=self.distributed)
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
        return TrainingState(self.model, self.optimizers, ema=self.ema, is_lora=self.config.lora_rank is not None)

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
