"""The loop: batch, loss, gradient, update; evaluate, save, stop when asked."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qkv.config import TrainingConfig
from qkv.data import prefetch
from qkv.errors import InputError, RunError, TrainingError, WeightsError
from qkv.training.averaging import Averaged
from qkv.training.evaluation import chosen_measure, evaluate, is_better
from qkv.training.family import TrainingData
from qkv.training.finite import bad_weight, first_bad
from qkv.training.lora import merged_weights
from qkv.training.objectives import Objective, Outcome, TrainingBatch
from qkv.training.optimizer import build_optimizers, optimizer_tensors, restore_optimizers, set_learning_rate
from qkv.training.pieces import cut_like, whole
from qkv.training.ranks import ALONE, Ranks
from qkv.training.run import Progress, RunFolder, read_checkpoint, read_progress, this_machine
from qkv.training.schedule import learning_rate
from qkv.training.signals import StopRequest, stop_requests
from qkv.weights.names import NameTable, Rename
from qkv.weights.tensors import fill

Report = Callable[[Mapping[str, Any]], None]
"""Called with each line that goes into metrics.jsonl, for a progress bar to draw."""


@dataclass(frozen=True, kw_only=True)
class _Gradients:
    """What is known of a batch when its gradients are made."""

    loss: float
    """A target."""
    norm: float
    """Before clipping."""
    measures: Mapping[str, float]


class _EvaluationStopped(Exception):  # noqa: N818 - nothing is wrong
    """A signal came; what was summed so far is thrown away."""


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
        self.objective = ranks.share(model, objective)
        self.data = data
        self.run = run
        self.texts = texts
        self.report = report
        self.examine = examine
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._device = self._parameters[0].device
        self.progress = Progress(made_on=this_machine(self._device) + ranks.label)
        self._saved_step: int | None = None
        self.optimizers = build_optimizers(model, config)
        self.averaged = None if config.averaging is None else Averaged(model, config.averaging)

    def train(self) -> StopRequest:
        """Go on until the last step, early stopping, or a signal; a checkpoint of where it stopped is saved."""
        self.model.train()
        self._check_weights()
        with stop_requests() as stop, closing(prefetch(self.data.batch, self.progress.step)) as batches:
            while True:
                self._evaluate_if_due(stop)
                self._save_if_due(must=self.ranks.agree(stop) is not None or self._is_done)
                # A signal may have come since that question: then this step ends the run only if it was saved.
                is_saved = self._saved_step == self.progress.step
                if is_saved and (self._is_done or self.ranks.agree(stop) is not None):
                    return stop
                self._step(next(batches))

    def resume(self, say: Callable[[str], None]) -> None:
        """Take up the run's last good checkpoint; a run that was cut off before its first one begins anew."""
        step = self.ranks.of_first(lambda: self.run.last_good(say)[0].step if self.run.steps() else -1)
        if step >= 0:
            folder = self.run.folder(int(step))
            progress = read_progress(folder, int(step))
            self._restore(folder)
            made_on = self.progress.made_on
            if progress.made_on != made_on:
                say(f"the run was made on {progress.made_on}, this is {made_on}: the last bits may differ")
            self.progress, self._saved_step = progress, progress.step
        if self.ranks.is_first:
            self.run.tidy(self.progress, say)
            self.run.rotate(keep=self.config.keep, best=self.progress.best_step)
        self.ranks.wait()

    @property
    def _is_done(self) -> bool:
        patience = self.config.patience
        return self.progress.step >= self.config.steps or (patience is not None and self.progress.n_worse >= patience)

    def _step(self, batch: TrainingBatch) -> None:
        started = time.perf_counter()
        step = self.progress.step
        made = self._gradients(batch, step)
        rate = learning_rate(self.config, step)
        self._update(rate)
        self.progress = replace(
            self.progress,
            step=step + 1,
            n_tokens=self.progress.n_tokens + batch.n_tokens,
            seconds=self.progress.seconds + time.perf_counter() - started,
        )
        self._log(
            {
                "step": step + 1,
                "loss": made.loss,
                **made.measures,
                "gradient_norm": made.norm,
                "learning_rate": rate,
                "tokens": self.progress.n_tokens,
                "seconds": round(self.progress.seconds, 4),
            }
        )

    def _gradients(self, batch: TrainingBatch, step: int) -> "_Gradients":
        """Leave the batch's gradients, clipped, in the model."""
        if batch.n_targets == 0:
            raise self._stopping("the batch has no target to predict")
        loss = torch.zeros((), device=self._device)
        sums: dict[str, Tensor] = {}
        for outcome, counts in self._outcomes(batch, step):
            # Weighted by real target counts: the parts' gradients add up to the whole batch's. Ranks average theirs.
            share, weight = outcome.loss / batch.n_targets, self.ranks.world * counts
            (share if weight == 1 else weight * share).backward()
            loss += share.detach() if counts else 0.0
            for name, measure in outcome.measures.items():
                both = torch.stack((measure.total.detach().float(), measure.count.detach().float()))
                both = both if counts else torch.zeros_like(both)
                sums[name] = sums[name] + both if name in sums else both
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        # The one place in a step where the CPU waits for the device.
        added = self.ranks.summed(torch.cat((loss[None], *sums.values())))
        size, value, *measured = torch.cat((whole(norm).float()[None], added)).tolist()
        if not (math.isfinite(value) and math.isfinite(size)):
            bad = first_bad(self.model, lambda: (outcome.loss for outcome, _ in self._outcomes(batch, step)))
            # Gradients are everyone's; whose part it began in knows better.
            bad = next((found for found in self.ranks.texts(bad) if "gradient" not in found), bad)
            raise self._stopping(f"loss {value}: {bad} is not a finite number")
        if self.config.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self.config.clip, norm, foreach=True)
        totals, counts = measured[::2], measured[1::2]
        measures = {name: of / max(n, 1.0) for name, of, n in zip(sums, totals, counts, strict=True)}
        return _Gradients(loss=value, norm=size, measures=measures)

    def _outcomes(self, batch: TrainingBatch, step: int) -> Iterator[tuple[Outcome, bool]]:
        """Of each part that fits in memory and is this process's; and whether it counts."""
        for (i, part), counts in self.ranks.shared(enumerate(batch.split(self.config.micro_batch_size))):
            # Dropout, too, is a function of (seed, step, part), so nothing of it need be saved.
            torch.manual_seed((self.config.seed * 1_000_003 + step) * 1_009 + i)
            try:
                yield self.objective(part), counts
            except InputError as error:
                raise self._stopping(str(error)) from None

    def seconds_a_step(self, n: int = 9) -> float:
        """Measured on the first batches; the model is changed by it, so use one made for that.

        Each batch is taken twice and timed the second time: the first also compiles, allocates, and makes a GPU's
        libraries choose their kernels for its shape. The median, for the machine may be busy for a moment.
        """
        self.model.train()
        seconds = []
        for step in (*range(n), *range(n)):
            started = time.perf_counter()
            self._gradients(self.data.batch(step), step)
            self._update(learning_rate(self.config, step))
            seconds.append(time.perf_counter() - started)
        return self.ranks.of_first(lambda: statistics.median(seconds[n:]))

    def _update(self, rate: float) -> None:
        for optimizer in self.optimizers:
            set_learning_rate(optimizer, rate)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if self.averaged is not None:
            self.averaged.update(self.progress.step)

    def _evaluate_if_due(self, stop: StopRequest) -> None:
        progress = self.progress
        is_due = progress.step > 0 and (progress.step % self.config.evaluate_every == 0 or self._is_done)
        if self.data.validation is None or not is_due or progress.evaluated_step == progress.step:
            return
        try:
            with nullcontext() if self.averaged is None else self.averaged.in_place():
                batches = self._unless_stopped(self.data.validation(), stop)
                score = evaluate(self.model, self.objective, batches, ranks=self.ranks)
                self.model.eval()
                examined = self.examine()
                self.model.train()
        except _EvaluationStopped:
            return
        if not math.isfinite(score.loss):
            raise self._stopping(f"validation loss {score.loss} is not a finite number", undone="nothing was saved")
        measure = chosen_measure(self.config.best_by, score.measures)
        is_best = is_better(score.loss, progress.best_loss, measure=measure, best_measure=progress.best_measure)
        self.progress = replace(
            progress,
            evaluated_step=progress.step,
            best_loss=score.loss if is_best else progress.best_loss,
            best_measure=measure if is_best else progress.best_measure,
            best_step=progress.step if is_best else progress.best_step,
            n_worse=0 if is_best else progress.n_worse + 1,
        )
        measures = {f"validation_{name}": value for name, value in score.measures.items()}
        entry = {"step": progress.step, "validation_loss": score.loss, **measures, **examined, "is_best": is_best}
        self._log(entry)

    def _unless_stopped(self, batches: Iterable[TrainingBatch], stop: StopRequest) -> Iterator[TrainingBatch]:
        """An evaluation that a resumed run will do again may be cut short; one that can end the run is finished."""
        patience = self.config.patience
        may_end_run = self._is_done or (patience is not None and self.progress.n_worse + 1 >= patience)
        for batch in batches:
            if not may_end_run and self.ranks.agree(stop) is not None:
                raise _EvaluationStopped
            yield batch

    def _save_if_due(self, *, must: bool) -> None:
        progress = self.progress
        is_due = progress.step > 0 and (
            progress.step % self.config.save_every == 0 or progress.best_step == progress.step
        )
        if not (is_due or must) or self._saved_step == progress.step:
            return
        self._check_weights()
        progress = self.progress = replace(progress, metrics_bytes=self.run.metrics_bytes())
        self.ranks.save(self.run, progress, tensors=self._tensors(), texts=self.texts)
        self._saved_step = progress.step
        if self.ranks.is_first:
            self.run.rotate(keep=self.config.keep, best=progress.best_step)

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        """`model`: what to use. `resume`: the optimizers' memory, and the raw weights where those are others."""
        resume = {f"optimizer/{name}": t for name, t in optimizer_tensors(self.model, self.optimizers).items()}
        if self.averaged is None and self.config.lora_rank is None:
            return {"model.safetensors": dict(self.model.named_parameters()), "resume.safetensors": resume}
        resume |= {f"weights/{name}": parameter for name, parameter in self.model.named_parameters()}
        used = merged_weights(self.model) if self.averaged is None else self.averaged.weights
        return {"model.safetensors": used, "resume.safetensors": resume}

    @torch.no_grad()
    def _restore(self, folder: Path) -> None:
        parameters = dict(self.model.named_parameters())
        used, resume = read_checkpoint(folder, parameters)
        raw = {key.removeprefix("weights/"): t for key, t in resume.items() if key.startswith("weights/")}
        names = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        try:
            given = {name: cut_like(t, parameters.get(name, t)) for name, t in (raw or used).items()}
            fill(self.model, given, NameTable(renames=[Rename(name, (name,)) for name in names]))
        except WeightsError as error:
            raise RunError(f"{folder}: {error}; was the recipe changed?") from None
        if self.averaged is not None:
            for name, average in self.averaged.weights.items():
                average.copy_(cut_like(used[name], average))
        memory = {key.removeprefix("optimizer/"): t for key, t in resume.items() if key.startswith("optimizer/")}
        restore_optimizers(self.model, self.optimizers, memory)

    def _log(self, entry: Mapping[str, Any]) -> None:
        if self.ranks.is_first:
            self.run.log(entry)
            self.report(entry)

    def _check_weights(self) -> None:
        """What is not a number never gets into a checkpoint."""
        if (bad := bad_weight(self.model)) is not None:
            raise self._stopping(f"{bad} is not a finite number", undone="nothing was saved")

    def _stopping(self, reason: str, *, undone: str = "no update was made") -> TrainingError:
        kept = self.run.steps()
        last = f"the checkpoint of step {kept[-1]} is intact" if kept else "there is no checkpoint yet"
        return TrainingError(f"step {self.progress.step}: {reason}; {undone}, {last}")
