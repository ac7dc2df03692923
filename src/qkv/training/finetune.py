"""Fine-tune pre-trained BERT models for classification and regression."""

import json
import math
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qkv.choices import BackendName, ProblemType, ScheduleKind
from qkv.config import FinetuningConfig, TrainingConfig
from qkv.data.file_io import write_atomically
from qkv.data.labeled_texts import ConcatenatedEncodings, LengthGroupedLabeledBatches, Targets
from qkv.errors import ConfigError, RunError
from qkv.models import BERT
from qkv.text import Encoding, Tokenizer, tokenizer_files
from qkv.training.checkpoint import LogFunction, RunFolder
from qkv.training.classification import STEP_METRICS, classification_objective, predict_labels_in_row_order
from qkv.training.distributed import SignalInterrupt
from qkv.training.family import TrainingData
from qkv.training.finetune_data import EncodedTaskTexts, LabeledTask, sample_rows, tokenize_task_texts
from qkv.training.loop import MetricsCallback, Trainer
from qkv.training.lora import freeze_and_add_attention_lora
from qkv.training.step import build_train_step
from qkv.training.task_metrics import compute_task_metrics, confusion_matrix
from qkv.weights.model_loader import load_model

RESULT_FILE = "result.json"
TARGET_UPDATES = 2000
"""Target number of updates. Small tasks underfit with fewer updates (arXiv:2006.04884), and additional updates help
little."""
MIN_EPOCHS, MAX_EPOCHS = 3, 20
N_EVALUATIONS = 10
EVAL_BATCH_SIZE = 256
"""Number of rows per evaluation batch."""
BASE_LEARNING_RATE, BASE_PARAMETERS = 5e-5, 110e6
"""Usual learning rate of BERT base, and its number of parameters. For other model sizes, the rate is scaled by
1/√parameters, which matches the published values of 2e-4 for 5M parameters and 3e-5 for BERT large."""


@dataclass(frozen=True, kw_only=True)
class FinetuneResult:
    """The result of one fine-tuning run, saved as result.json."""

    seed: int
    scores: dict[str, float]
    """Metrics of the best checkpoint on the evaluation rows. The main metric comes first."""
    n_parameters: int
    n_train: int
    n_evaluation: int
    n_truncated: int
    epochs: int
    """Planned number of epochs."""
    steps: int
    """Number of completed steps when the run ended."""
    best_step: int
    seconds: float
    """Time spent in training steps."""
    learning_rate: float
    class_names: list[str] | None
    confusion: list[list[int]] | None
    """Confusion matrix with true classes as rows and predicted classes as columns."""
    planned_steps: int | None = None
    """Planned number of steps, which exceeds `steps` if the run stopped early. None in results saved by older
    versions."""

    @property
    def epochs_completed(self) -> float:
        return self.epochs * self.steps / (self.planned_steps or self.steps)


def choose_training_config(
    settings: FinetuningConfig, *, n_rows: int, n_parameters: int, longest: int
) -> TrainingConfig:
    """Choose the training settings based on the sizes of the task and the model.

    Small datasets use small batches and many epochs so that there are enough updates. Large datasets use larger batches
    and three epochs. Randomly initialized weights, LoRA matrices and a head on a frozen model use a higher learning
    rate because they start far from a solution and have no pre-training to forget.
    """
    batch_size = settings.batch_size or (16 if n_rows < 500 else 32 if n_rows < 20_000 else 64)
    n_batches = math.ceil(n_rows / batch_size)
    epochs = settings.epochs or min(MAX_EPOCHS, max(MIN_EPOCHS, math.ceil(TARGET_UPDATES / n_batches)))
    rate_factor = (
        5.0 if settings.freeze == "all" or settings.lora_rank is not None else 2.0 if settings.from_scratch else 1.0
    )
    rate = min(1e-3, BASE_LEARNING_RATE * (BASE_PARAMETERS / n_parameters) ** 0.5 * rate_factor)
    steps = epochs * n_batches
    return TrainingConfig(
        steps=steps,
        batch_size=batch_size,
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
        compile=settings.compile,
        eval_every=math.ceil(steps / N_EVALUATIONS),
        save_every=steps,
        keep_checkpoints=1,
        patience=settings.patience,
        best_metric=None if settings.problem_type is ProblemType.REGRESSION else STEP_METRICS[settings.problem_type],
    )


def build_model_and_list_new_weights(
    start: BERT, task: LabeledTask, settings: FinetuningConfig, *, seed: int
) -> tuple[BERT, list[str]]:
    """Return the model with a head for the task, and the names of the randomly initialized weights.

    If the model already has a head with the same problem type and classes, the head is kept so that fine-tuning can
    continue.
    """
    start_config = start.config
    config = start_config.replace(
        class_names=task.class_names,
        n_classes=task.n_outputs,
        problem_type=task.problem_type,
        pooler=True,
        masked_lm_head=False,
        next_sentence_head=False,
        sentence_embedding=None,
        dropout=settings.dropout,
    )
    model = BERT(config, seed=seed)
    same_head = (start_config.class_names, start_config.problem_type, start_config.n_classes) == (
        task.class_names,
        task.problem_type,
        task.n_outputs,
    )
    start_weights = {} if settings.from_scratch else start.state_dict()
    copied = {
        name: start_weights[name]
        for name in model.state_dict()
        if name in start_weights and (same_head or not name.startswith("classifier."))
    }
    model.load_state_dict(copied, strict=False)
    if task.problem_type is ProblemType.REGRESSION and "classifier.bias" not in copied and model.classifier is not None:
        # Start at the mean of the targets. If the model started at 0, learning the mean would take the first epoch.
        torch.nn.init.constant_(model.classifier.bias, float(task.train_targets.mean()))
    return model, [name for name, _ in model.named_parameters() if name not in copied]


def freeze_layers_or_add_lora(model: BERT, settings: FinetuningConfig, *, seed: int) -> None:
    """Freeze the layers selected by the settings, or add LoRA.

    The pooler and the head always remain trainable.
    """
    n_layers = model.config.n_layers
    if settings.lora_rank is not None:
        freeze_and_add_attention_lora(model, rank=settings.lora_rank, seed=seed)
    elif settings.freeze:
        n = n_layers if settings.freeze == "all" else settings.freeze
        if n > n_layers:
            raise ConfigError(f"freeze must be at most the number of layers ({n_layers}), got {n}")
        frozen_prefixes = ("embedding.", *(f"blocks.{layer}." for layer in range(n)))
        if settings.freeze == "all":
            frozen_prefixes = (*frozen_prefixes, "relative_positions.", "final_norm.")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen_prefixes))
    for head in (model.pooler, model.classifier):
        if head is not None:
            head.requires_grad_(requires_grad=True)


@dataclass(frozen=True, kw_only=True)
class FinetuneInputs:
    """The inputs shared by all fine-tuning runs of a model on a task."""

    start: BERT
    tokenizer: Tokenizer
    task: LabeledTask
    encoded: EncodedTaskTexts
    settings: FinetuningConfig

    @classmethod
    def tokenize_task(
        cls, start: BERT, tokenizer: Tokenizer, task: LabeledTask, settings: FinetuningConfig, *, log: LogFunction
    ) -> "FinetuneInputs":
        """Tokenize the texts of the task once for all seeds."""
        length = start.config.context_length
        encoded = tokenize_task_texts(task, tokenizer, context_length=length, truncate=settings.truncate, log=log)
        return cls(start=start, tokenizer=tokenizer, task=task, encoded=encoded, settings=settings)


def fine_tune_or_resume(
    inputs: FinetuneInputs,
    *,
    seed: int,
    folder: Path,
    device: torch.device,
    report: MetricsCallback,
    log: LogFunction,
    backend: str = BackendName.AUTO,
) -> FinetuneResult:
    """Start or resume a fine-tuning run in `folder`.

    If the run has already finished, its saved result is returned.
    """
    if (folder / RESULT_FILE).is_file():
        return _load_result(folder / RESULT_FILE)
    task, encoded, settings = inputs.task, inputs.encoded, inputs.settings
    model, new_weights = build_model_and_list_new_weights(inputs.start, task, settings, seed=seed)
    if new_weights and not settings.from_scratch:
        log(f"randomly initialized weights: {', '.join(new_weights)}")
    rows = np.arange(len(encoded.train))
    if settings.n_train_rows is not None:
        rows = sample_rows(task.problem_type, task.train_targets, settings.n_train_rows, seed=seed)
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    longest = max(len(row.ids) for row in (*encoded.train, *encoded.evaluation))
    training = choose_training_config(settings, n_rows=len(rows), n_parameters=n_parameters, longest=longest)
    training = training.replace(seed=seed)
    freeze_layers_or_add_lora(model, settings, seed=seed)
    trainer = _build_finetune_trainer(
        inputs, model.to(device), training, rows=rows, run=RunFolder(folder), report=report, backend=backend
    )
    trainer.resume(log)
    stop = trainer.train()
    if stop.signal is not None and trainer.progress.step < training.steps:
        raise SignalInterrupt(stop.signal)
    result = FinetuneResult(
        seed=seed,
        n_parameters=n_parameters,
        n_train=len(rows),
        n_evaluation=len(encoded.evaluation),
        n_truncated=encoded.n_truncated,
        epochs=training.steps // math.ceil(len(rows) / training.batch_size),
        steps=trainer.progress.step,
        planned_steps=training.steps,
        best_step=trainer.progress.best_step or trainer.progress.step,
        seconds=round(trainer.progress.seconds, 3),
        learning_rate=training.learning_rate,
        class_names=None if task.class_names is None else list(task.class_names),
        **_evaluate_checkpoint(inputs, trainer.run.best_or_latest_checkpoint(), training, device),
    )
    write_atomically(folder / RESULT_FILE, json.dumps(asdict(result), indent=1).encode())
    return result


def _build_finetune_trainer(
    inputs: FinetuneInputs,
    model: BERT,
    training: TrainingConfig,
    *,
    rows: NDArray[np.int64],
    run: RunFolder,
    report: MetricsCallback,
    backend: str,
) -> Trainer:
    task, encoded = inputs.task, inputs.encoded
    device = model.embedding.token.weight.device
    batches = _build_buckets(inputs, [encoded.train[row] for row in rows], task.train_targets[rows], training, device)
    held_out = _build_buckets(inputs, encoded.evaluation, task.evaluation_targets, training, device)
    create_objective = partial(classification_objective, model, training, target_variance=task.target_variance_or_one)
    return Trainer(
        build_train_step(model, training, create_objective, backend=backend),
        data=TrainingData(
            batch=batches.batch, validation=lambda: held_out.eval_batches_sorted_by_length(EVAL_BATCH_SIZE)
        ),
        run=run,
        texts={
            "config.json": json.dumps(model.config.model_dump(mode="json", exclude_none=True), indent=2),
            **tokenizer_files(inputs.tokenizer),
        },
        report=lambda entry: report({**entry, "total_steps": training.steps}),
    )


def _build_buckets(
    inputs: FinetuneInputs, rows: list[Encoding], targets: Targets, training: TrainingConfig, device: torch.device
) -> LengthGroupedLabeledBatches:
    return LengthGroupedLabeledBatches(
        ConcatenatedEncodings(rows),
        targets,
        batch_size=training.batch_size,
        seed=training.seed,
        pad_id=inputs.encoded.pad_id,
        width_multiple=8 if device.type == "cuda" else 1,
        max_width=inputs.start.config.context_length,
    )


def _evaluate_checkpoint(
    inputs: FinetuneInputs, checkpoint: Path, training: TrainingConfig, device: torch.device
) -> dict[str, Any]:
    """Evaluate the saved checkpoint because it is the model that will be used."""
    task = inputs.task
    model = load_model(checkpoint).model
    assert isinstance(model, BERT)
    targets = task.evaluation_targets.numpy()
    rows = _build_buckets(inputs, inputs.encoded.evaluation, task.evaluation_targets, training, device)
    predictions = predict_labels_in_row_order(
        model.to(device), rows.eval_batches_sorted_by_length(EVAL_BATCH_SIZE), precision=inputs.settings.precision
    )
    has_classes = task.problem_type is ProblemType.SINGLE_LABEL
    return {
        "scores": compute_task_metrics(task.problem_type, predictions, targets, n_classes=task.n_outputs),
        "confusion": confusion_matrix(predictions, targets, n_classes=task.n_outputs).tolist() if has_classes else None,
    }


def _load_result(path: Path) -> FinetuneResult:
    try:
        return FinetuneResult(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{path}: invalid fine-tuning result: {error}") from None
