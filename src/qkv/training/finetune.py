"""Fine-tuning: a pre-trained BERT and labelled texts in, a model for the task out, by the trainer of every run."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qkv.choices import ProblemKind, ScheduleKind
from qkv.config import FinetuningConfig, TrainingConfig
from qkv.data.buckets import Buckets, Sequences, Targets
from qkv.data.disk import write_whole
from qkv.errors import ConfigError, RunError
from qkv.models import BERT
from qkv.text import EncodedPair, Tokenizer, tokenizer_files
from qkv.training.classify import STEP_MEASURES, answers, class_of_text
from qkv.training.family import TrainingData
from qkv.training.finetune_data import Encoded, LabelledTask, draw, encode_task
from qkv.training.lora import add_lora
from qkv.training.measures import confusion, measure
from qkv.training.run import RunFolder, Say
from qkv.training.signals import Stopped
from qkv.training.trainer import Report, Trainer
from qkv.weights.models import load_model

RESULT = "result.json"
UPDATES = 2000
"""A run aims at so many: below, small sets leave BERT unfinished (arXiv:2006.04884); above, time goes for little."""
MIN_EPOCHS, MAX_EPOCHS = 3, 20
EVALUATIONS = 10
ROWS_AT_ONCE = 256
"""Of an evaluation."""
BASE_RATE, BASE_PARAMETERS = 5e-5, 110e6
"""BERT base's usual learning rate; others' goes with 1/√parameters, which meets the published 2e-4 of 5M models and
3e-5 of BERT large."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of one run."""

    seed: int
    scores: dict[str, float]
    """On the evaluation rows, with the best checkpoint; the chief figure first."""
    n_parameters: int
    n_train: int
    n_evaluation: int
    n_cut: int
    epochs: int
    """Planned."""
    steps: int
    """Made before the run ended."""
    best_step: int
    seconds: float
    """Of training steps."""
    learning_rate: float
    class_names: list[str] | None
    confusion: list[list[int]] | None
    """Row: the true class; column: the one answered."""
    planned_steps: int | None = None
    """More than `steps` where the run stopped early; None in a run of before this was kept."""

    @property
    def epochs_made(self) -> float:
        return self.epochs * self.steps / (self.planned_steps or self.steps)


def choose_training(settings: FinetuningConfig, *, n_rows: int, n_parameters: int, longest: int) -> TrainingConfig:
    """Few rows: small batches and many epochs, for it is updates that teach. Many rows: larger ones, three epochs.

    Random weights, thin matrices beside frozen ones and a head alone have further to go than trained weights, and
    nothing to forget: they learn faster.
    """
    size = settings.batch_size or (16 if n_rows < 500 else 32 if n_rows < 20_000 else 64)
    n_batches = math.ceil(n_rows / size)
    epochs = settings.epochs or min(MAX_EPOCHS, max(MIN_EPOCHS, math.ceil(UPDATES / n_batches)))
    faster = (
        5.0 if settings.freeze == "all" or settings.lora_rank is not None else 2.0 if settings.from_scratch else 1.0
    )
    rate = min(1e-3, BASE_RATE * (BASE_PARAMETERS / n_parameters) ** 0.5 * faster)
    steps = epochs * n_batches
    return TrainingConfig(
        steps=steps,
        batch_size=size,
        seq_len=longest,
        learning_rate=settings.learning_rate or rate,
        min_lr_ratio=0.0,
        schedule=ScheduleKind.LINEAR,
        warmup_steps=steps // 10,
        weight_decay=0.01,
        beta2=0.999,
        lora_rank=settings.lora_rank,
        layer_decay=settings.layer_decay,
        precision=settings.precision,
        compile=settings.compiled,
        eval_every=math.ceil(steps / EVALUATIONS),
        save_every=steps,
        keep_checkpoints=1,
        patience=settings.patience,
        best_by=None if settings.problem is ProblemKind.NUMBER else STEP_MEASURES[settings.problem],
    )


def task_model(start: BERT, task: LabelledTask, settings: FinetuningConfig, *, seed: int) -> tuple[BERT, list[str]]:
    """The model with a head for the task, and the names of weights that are new.

    A head that answers the same question with the same classes is kept: one may go on fine-tuning.
    """
    given = start.config
    config = given.replace(
        class_names=task.class_names,
        n_classes=task.n_outputs,
        problem=task.problem,
        pooler=True,
        masked_word_head=False,
        next_sentence_head=False,
        sentence_embedding=None,
        dropout=settings.dropout,
    )
    model = BERT(config, seed=seed)
    same_head = (given.class_names, given.problem, given.n_classes) == (task.class_names, task.problem, task.n_outputs)
    trained = {} if settings.from_scratch else start.state_dict()
    kept = {
        name: trained[name]
        for name in model.state_dict()
        if name in trained and (same_head or not name.startswith("classifier."))
    }
    model.load_state_dict(kept, strict=False)
    if task.problem is ProblemKind.NUMBER and "classifier.bias" not in kept and model.classifier is not None:
        # The mean is the best first guess; from 0 on, the first epoch would go for finding it.
        torch.nn.init.constant_(model.classifier.bias, float(task.train_targets.mean()))
    return model, [name for name, _ in model.named_parameters() if name not in kept]


def freeze(model: BERT, settings: FinetuningConfig, *, seed: int) -> None:
    """Leave to learn what the settings say; the pooler and the head always do."""
    n_layers = model.config.n_layers
    if settings.lora_rank is not None:
        add_lora(model, rank=settings.lora_rank, seed=seed)
    elif settings.freeze:
        n = n_layers if settings.freeze == "all" else settings.freeze
        if n > n_layers:
            raise ConfigError(f"freeze={n}, but the model has {n_layers} layers")
        below = ("embedding.", *(f"blocks.{layer}." for layer in range(n)))
        if settings.freeze == "all":
            below = (*below, "relation.", "final_norm.")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(below))
    for head in (model.pooler, model.classifier):
        if head is not None:
            head.requires_grad_(requires_grad=True)


@dataclass(frozen=True, kw_only=True)
class Material:
    """What all runs of one model on one task share."""

    start: BERT
    tokenizer: Tokenizer
    task: LabelledTask
    encoded: Encoded
    settings: FinetuningConfig

    @classmethod
    def gather(
        cls, start: BERT, tokenizer: Tokenizer, task: LabelledTask, settings: FinetuningConfig, *, say: Say
    ) -> "Material":
        """The texts become ids here, once for all seeds."""
        length = start.config.context_length
        encoded = encode_task(task, tokenizer, context_length=length, truncate=settings.truncate, say=say)
        return cls(start=start, tokenizer=tokenizer, task=task, encoded=encoded, settings=settings)


def fine_tune(
    material: Material, *, seed: int, folder: Path, device: torch.device, report: Report, say: Say
) -> Result:  # fmt: skip
    """One run in `folder`, begun or gone on with; one that is finished is only told of."""
    if (folder / RESULT).is_file():
        return _read_result(folder / RESULT)
    task, encoded, settings = material.task, material.encoded, material.settings
    model, new = task_model(material.start, task, settings, seed=seed)
    if new and not settings.from_scratch:
        say(f"new, with random weights: {', '.join(new)}")
    rows = np.arange(len(encoded.train))
    if settings.n_labels is not None:
        rows = draw(task.problem, task.train_targets, settings.n_labels, seed=seed)
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    longest = max(len(row.ids) for row in (*encoded.train, *encoded.evaluation))
    training = choose_training(settings, n_rows=len(rows), n_parameters=n_parameters, longest=longest)
    training = training.replace(seed=seed)
    freeze(model, settings, seed=seed)
    trainer = _trainer(material, model.to(device), training, rows=rows, run=RunFolder(folder), report=report)
    trainer.resume(say)
    stop = trainer.train()
    if stop.signal is not None and trainer.progress.step < training.steps:
        raise Stopped(stop.signal)
    result = Result(
        seed=seed,
        n_parameters=n_parameters,
        n_train=len(rows),
        n_evaluation=len(encoded.evaluation),
        n_cut=encoded.n_cut,
        epochs=training.steps // math.ceil(len(rows) / training.batch_size),
        steps=trainer.progress.step,
        planned_steps=training.steps,
        best_step=trainer.progress.best_step or trainer.progress.step,
        seconds=round(trainer.progress.seconds, 3),
        learning_rate=training.learning_rate,
        class_names=None if task.class_names is None else list(task.class_names),
        **_judged(material, trainer.run.best(), training, device),
    )
    write_whole(folder / RESULT, json.dumps(asdict(result), indent=1).encode())
    return result


def _trainer(
    material: Material, model: BERT, training: TrainingConfig, *, rows: NDArray[np.int64], run: RunFolder,
    report: Report,
) -> Trainer:  # fmt: skip
    task, encoded = material.task, material.encoded
    device = model.embedding.token.weight.device
    batches = _buckets(material, [encoded.train[row] for row in rows], task.train_targets[rows], training, device)
    held_out = _buckets(material, encoded.evaluation, task.evaluation_targets, training, device)
    return Trainer(
        model,
        training,
        objective=class_of_text(model, training, variance=task.variance),
        data=TrainingData(batch=batches.batch, validation=lambda: held_out.sweep(ROWS_AT_ONCE)),
        run=run,
        texts={
            "config.json": json.dumps(model.config.model_dump(mode="json", exclude_none=True), indent=2),
            **tokenizer_files(material.tokenizer),
        },
        report=lambda entry: report({**entry, "of": training.steps}),
    )


def _buckets(
    material: Material, rows: list[EncodedPair], targets: Targets, training: TrainingConfig, device: torch.device
) -> Buckets:
    return Buckets(
        Sequences(rows),
        targets,
        batch_size=training.batch_size,
        seed=training.seed,
        pad_id=material.encoded.pad_id,
        multiple=8 if device.type == "cuda" else 1,
        max_width=material.start.config.context_length,
    )


def _judged(material: Material, checkpoint: Path, training: TrainingConfig, device: torch.device) -> dict[str, Any]:
    """The scores of what lies on disk: that is what will be used."""
    task = material.task
    model = load_model(checkpoint).model
    assert isinstance(model, BERT)
    truth = task.evaluation_targets.numpy()
    rows = _buckets(material, material.encoded.evaluation, task.evaluation_targets, training, device)
    found = answers(model.to(device), rows.sweep(ROWS_AT_ONCE), precision=material.settings.precision)
    is_table = task.problem is ProblemKind.ONE_CLASS
    return {
        "scores": measure(task.problem, found, truth, n_classes=task.n_outputs),
        "confusion": confusion(found, truth, n_classes=task.n_outputs).tolist() if is_table else None,
    }


def _read_result(path: Path) -> Result:
    try:
        return Result(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{path}: not the result of a run: {error}") from None
