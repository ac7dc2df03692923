"""The loop: batch, loss, gradient, update; evaluate, save, stop when asked."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from qkv.config import TrainingConfig
from qkv.data import prefetch
from qkv.errors import InputError, TrainingError
from qkv.training.gradient_accumulation import accumulate_gradients
from qkv.training.ema import Averaged
from qkv.training.evaluation import EvaluationStopped, evaluate, judged, unless
from qkv.training.family import TrainingData
from qkv.training.finite import bad_weight, first_bad
from qkv.training.objectives import Halves, Objective, Outcome, Sent, TrainingBatch
from qkv.training.optimizer import build_optimizers, clip_gradients, set_learning_rate, skip_where
from qkv.training.pacing import Pace
from qkv.training.pieces import is_cut
from qkv.training.products import with_quick_products
from qkv.training.ranks import ALONE, Ranks
from qkv.training.reading import Known, Made, Unread, pinned, sent
from qkv.training.replaying import Replay, is_replayed
from qkv.training.run import Progress, RunFolder, read_progress, this_machine
from qkv.training.schedule import learning_rate
from qkv.training.signals import StopRequest, stop_requests
from qkv.training.state import State
from qkv.training.stopwatch import keep_freed_memory

Report = Callable[[Mapping[str, Any]], None]
"""Called with each line that goes into metrics.jsonl, for a progress bar to draw."""


class Trainer:
    """Trains one model in one run folder. Every number is a pure function of config, data and step."""

    def __init__(
        self, model: nn.Module, config: TrainingConfig, *, objective: Objective, data: TrainingData, run: RunFolder,
        texts: Mapping[str, str], report: Report = lambda _entry: None,
        examine: Callable[[], Mapping[str, Any]] = dict, ranks: Ranks = ALONE,
    ) -> None:  # fmt: skip
        """`texts`: files that go into each checkpoint beside the weights, such as config.json.

        `examine`: what an evaluation logs besides loss and measures, such as the quality of whole outputs.
        `ranks`: the processes that share the work; this one alone unless said.
        """
        self.ranks = ranks
        self.model = model
        self.config = config
        self.objective = ranks.share(model, with_quick_products(model, objective, config))
        self.data = data
        self.run = run
        self.texts = texts
        self.report, self.examine = report, examine
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._device = self._parameters[0].device
        if self._device.type == "cpu":
            keep_freed_memory()  # a step of GPT-2 124M takes an eighth less time, and the same numbers come out
        self.progress = Progress(made_on=this_machine(self._device) + ranks.label)
        self._saved_step: int | None = None
        self._replay: Replay[Made] | None = Replay() if is_replayed(self.objective, config, self._device) else None
        self.optimizers = build_optimizers(model, config, is_recorded=self._replay is not None)
        self.averaged = None if config.ema_decay is None else Averaged(model, config.ema_decay)
        # torch's AdamW in pieces cannot be told on the device to leave a step out.
        self._reads_late = self._device.type == "cuda" and not any(is_cut(p) for p in self._parameters)
        self._is_bad = torch.zeros((), device=self._device)
        """1 from the first step on whose loss is no number: though that is seen late, no update is made any more."""
        self._unread: tuple[Unread, float, Progress] | None = None

    def train(self, pace: Pace | None = None) -> StopRequest:
        """Go on until the last step, which `pace` may move, early stopping, or a signal; where it stopped is saved."""
        self.model.train()
        self._check_weights()
        with stop_requests() as stop, closing(prefetch(self._batch, self.progress.step)) as batches:
            while True:
                self._evaluate_if_due(stop)
                plan = None if pace is None else pace.plan(self.config, self.progress, self.ranks)
                self._save_if_due(must=plan is not None or self.ranks.any_rank_stopping(stop) is not None or self._is_done)
                if pace is not None and plan is not None:
                    pace.keep(plan)
                    self.config = plan
                # A signal may have come since that question: then this step ends the run only if it was saved.
                is_saved = self._saved_step == self.progress.step
                if is_saved and (self._is_done or self.ranks.any_rank_stopping(stop) is not None):
                    return stop
                self._step(next(batches))

    def resume(self, say: Callable[[str], None]) -> None:
        """Take up the run's last good checkpoint; a run that was cut off before its first one begins anew."""
        step = self.ranks.of_first(lambda: self.run.last_good(say)[0].step if self.run.steps() else -1)
        if step >= 0:
            folder = self.run.folder(int(step))
            progress = read_progress(folder, int(step))
            self._state().restore(folder)
            made_on = self.progress.made_on
            if progress.made_on != made_on:
                say(f"the run was made on {progress.made_on}, this is {made_on}: the last bits may differ")
            self.progress, self._saved_step = progress, progress.step
        if self.ranks.is_first:
            self.run.tidy(self.progress, say)
            self.run.rotate(keep=self.config.keep_checkpoints, best=self.progress.best_step)
        self.ranks.wait()

    @property
    def _is_done(self) -> bool:
        patience = self.config.patience
        return self.progress.step >= self.config.steps or (patience is not None and self.progress.n_worse >= patience)

    def _batch(self, t: int) -> TrainingBatch:
        batch = self.data.batch(t)
        return pinned(batch) if self._device.type == "cuda" else batch

    def _step(self, batch: TrainingBatch) -> None:
        started = time.perf_counter()
        step = self.progress.step
        rate = learning_rate(self.config, step)
        made = self._work(batch, step, rate)
        self.settle()
        n_tokens = self.progress.n_tokens + batch.n_tokens
        seconds = self.progress.seconds + time.perf_counter() - started
        self.progress = replace(self.progress, step=step + 1, n_tokens=n_tokens, seconds=seconds)
        self._unread = made, rate, self.progress
        if not self._reads_late:
            self.settle()

    def settle(self) -> None:
        """Read and log the last step, where that was left until the next one is under way."""
        if self._unread is None:
            return
        (made, rate, progress), self._unread = self._unread, None
        done = {"learning_rate": rate, "tokens": progress.n_tokens, "seconds": round(progress.seconds, 4)}
        self._log({"step": progress.step, **self._known(made).logged(), **done})

    def _known(self, made: Unread) -> Known:
        """Its numbers, or the end of the run where they are none."""
        known = made.read()
        if math.isfinite(known.loss) and math.isfinite(known.norm):
            return known
        batch, step = made.batch, made.step
        if self._reads_late:
            self._gradients(batch, step)  # again, for their names: the weights are still those of that step
        bad = first_bad(self.model, lambda: (outcome.loss for outcome, _ in self._outcomes(batch, step)))
        # Gradients are everyone's; whose part it began in knows better.
        bad = next((found for found in self.ranks.texts(bad) if "gradient" not in found), bad)
        raise self._stopping(f"loss {known.loss}: {bad} is not a finite number", step=step)

    def _work(self, batch: TrainingBatch, step: int, rate: float) -> Unread:
        """Gradients and update."""
        if batch.n_targets == 0:
            raise self._stopping("the batch has no target to predict")
        for optimizer in self.optimizers:
            set_learning_rate(optimizer, rate)
        if self._replay is None:
            made = self._gradients(batch, step)
            if not self._reads_late:
                self._known(made)
            self._update(made.made)
        else:
            made = self._replayed(batch, step, self._replay)
        if self.averaged is not None:
            self.averaged.update(self.progress.step)
        return made

    def _gradients(self, batch: TrainingBatch, step: int) -> Unread:
        """Leave the batch's gradients in the model. Nothing here waits for a GPU."""
        return sent(self._added(self._outcomes(batch, step), batch.n_targets), batch, step)

    def _replayed(self, batch: TrainingBatch, step: int, replay: Replay[Made]) -> Unread:
        """The same with its update, by what was recorded of a step before."""
        objective = self.objective
        assert isinstance(objective, Halves)
        self._seed(step)
        with self._refusing():
            given = objective.send(batch)

        def work(inputs: Sent) -> Made:
            *there, n_targets = inputs
            assert n_targets is not None
            made = self._added([(objective.judge(*there), True)], n_targets)
            self._update(made)
            return made

        n_targets = torch.full((), float(batch.n_targets), device=self._device)
        return sent(replay((*given, n_targets), work), batch, step)

    def _added(self, outcomes: Iterable[tuple[Outcome, bool]], n_targets: int | Tensor) -> Made:
        made = accumulate_gradients(outcomes, n_targets, parameters=self._parameters, ranks=self.ranks)
        if self._reads_late:
            torch.maximum(self._is_bad, made.numbers[:2].isfinite().all().logical_not().float(), out=self._is_bad)
        return made

    def _outcomes(self, batch: TrainingBatch, step: int) -> Iterator[tuple[Outcome, bool]]:
        """Of each part that fits in memory and is this process's; and whether it counts."""
        for (i, part), counts in self.ranks.shared(enumerate(batch.split(self.config.micro_batch_size))):
            self._seed(step, part=i)
            with self._refusing():
                outcome = self.objective(part)
            yield outcome, counts

    def _seed(self, step: int, *, part: int = 0) -> None:
        """Dropout, too, is a function of (seed, step, part), so nothing of it need be saved."""
        torch.manual_seed((self.config.seed * 1_000_003 + step) * 1_009 + part)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except InputError as error:
            raise self._stopping(f"{error}, in a batch of {self.run.path}") from None

    def seconds_a_step(self, n: int = 9, *, now: Callable[[], float] = time.perf_counter) -> float:
        """Measured on the first batches; the model is changed by it, so use one made for that.

        Each batch is taken twice and timed the second time: the first also compiles, allocates, and makes a GPU's
        libraries choose their kernels for its shape. The median, for the machine may be busy for a moment.
        """
        self.model.train()
        seconds = []
        for step in (*range(n), *range(n)):
            started = now()
            self._known(self._work(self._batch(step), step, learning_rate(self.config, step)))
            seconds.append(now() - started)
        return self.ranks.of_first(lambda: statistics.median(seconds[n:]))

    def _update(self, made: Made) -> None:
        for optimizer in self.optimizers:
            if self.config.max_grad_norm is not None:
                clip_gradients(optimizer, made.norm, self.config.max_grad_norm, on_the_way=self._replay is not None)
            if self._reads_late:
                skip_where(self._is_bad, optimizer)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def _evaluate_if_due(self, stop: StopRequest) -> None:
        progress = self.progress
        is_due = progress.step > 0 and (progress.step % self.config.eval_every == 0 or self._is_done)
        if self.data.validation is None or not is_due or progress.evaluated_step == progress.step:
            return
        self.settle()
        patience = self.config.patience
        # An evaluation that a resumed run will do again may be cut short; one that can end the run is finished.
        may_end_run = self._is_done or (patience is not None and progress.n_worse + 1 >= patience)
        try:
            with nullcontext() if self.averaged is None else self.averaged.in_place():
                batches = self.data.validation()
                if not may_end_run:
                    batches = unless(lambda: self.ranks.any_rank_stopping(stop) is not None, batches)
                score = evaluate(self.model, self.objective, batches, ranks=self.ranks)
                self.model.eval()
                examined = self.examine()
                self.model.train()
        except EvaluationStopped:
            return
        if not math.isfinite(score.loss):
            raise self._stopping(f"validation loss {score.loss} is not a finite number", undone="nothing was saved")
        self.progress = judged(progress, score, best_by=self.config.best_by)
        measures = {f"validation_{name}": value for name, value in score.measures.items()}
        is_best = self.progress.best_step == progress.step
        self._log({"step": progress.step, "validation_loss": score.loss, **measures, **examined, "is_best": is_best})

    def _save_if_due(self, *, must: bool) -> None:
        progress, step = self.progress, self.progress.step
        is_due = step > 0 and (step % self.config.save_every == 0 or progress.best_step == step)
        if not (is_due or must) or self._saved_step == step:
            return
        self.settle()
        self._check_weights()
        progress = self.progress = replace(progress, metrics_bytes=self.run.metrics_bytes())
        self.ranks.save(self.run, progress, tensors=self._state().tensors(), texts=self.texts)
        self._saved_step = step
        if self.ranks.is_first:
            self.run.rotate(keep=self.config.keep_checkpoints, best=progress.best_step)

    def _log(self, entry: Mapping[str, Any]) -> None:
        if self.ranks.is_first:
            self.run.log(entry)
            self.report(entry)

    def _state(self) -> State:
        return State(self.model, self.optimizers, averaged=self.averaged, is_lora=self.config.lora_rank is not None)

    def _check_weights(self) -> None:
        """What is not a number never gets into a checkpoint."""
        if (bad := bad_weight(self.model)) is not None:
            raise self._stopping(f"{bad} is not a finite number", undone="nothing was saved")

    def _stopping(self, reason: str, *, undone: str = "no update was made", step: int | None = None) -> TrainingError:
        kept = self.run.steps()
        last = f"the checkpoint of step {kept[-1]} is intact" if kept else "there is no checkpoint yet"
        return TrainingError(f"step {self.progress.step if step is None else step}: {reason}; {undone}, {last}")
