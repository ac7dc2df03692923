"""Fine-tune BERT models on labeled texts."""

import json
import re
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qkv.choices import BackendName
from qkv.config import FinetuningConfig, FinetuningSettings, load_finetuning
from qkv.data.file_io import convert_os_errors_to_disk_error, read_json_object, write_atomically
from qkv.data.labeled_texts import LabeledTexts, labeled_texts_from_rows
from qkv.errors import ConfigError, InputError, MissingExtraError, RunError, WeightsError
from qkv.inspection.confusion import plot_confusion_matrix
from qkv.inspection.figures import plot_loss_curve
from qkv.tasks.loader import load_as
from qkv.tasks.text_encoder import TextEncoder
from qkv.training.checkpoint import LogFunction, RunFolder
from qkv.training.finetune import FinetuneInputs, FinetuneResult, fine_tune_or_resume
from qkv.training.finetune_data import (
    LabeledTask,
    build_task_with_evaluation_split,
    load_labeled_rows,
    load_task_with_evaluation_split,
)
from qkv.training.loop import MetricsCallback
from qkv.utils import resolve_device
from qkv.weights.checkpoint_folder import hash_file

CONFIG_FILE = "finetune.toml"
DIGEST_FILE = "data.json"
MIN_EVALUATION_ROWS = 30
"""The minimum number of evaluation rows for reliable scores.

With fewer rows, each row affects the accuracy by more than 3 percentage points.
"""
ReportFactory = Callable[[str, int], MetricsCallback]
"""A function `reports(model, seed)` that returns a callback for the metrics of that run's training steps."""
RowSource = str | Path | Sequence[Sequence[Any]]
"""The path of a file with labeled rows, or a sequence of (text, label) or (text, text, label) rows."""


@dataclass(frozen=True, kw_only=True)
class ModelRuns:
    """The fine-tuning runs of one model, with one run per seed."""

    name: str
    results: list[FinetuneResult]
    folders: list[Path]

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics, with the main metric first."""
        return list(self.results[0].scores)

    def mean(self, metric: str) -> float:
        return statistics.fmean(result.scores[metric] for result in self.results)

    def std(self, metric: str) -> float:
        """Return the standard deviation of a metric across the seeds, or 0 for a single seed."""
        values = [result.scores[metric] for result in self.results]
        return statistics.stdev(values) if len(values) > 1 else 0.0

    @property
    def best(self) -> Path:
        """The run folder for the seed with the best score on the main metric."""
        scores = [result.scores[self.metrics[0]] for result in self.results]
        return self.folders[scores.index(max(scores))]


@dataclass(frozen=True, kw_only=True)
class FinetuneOutput:
    """The result of `finetune`."""

    task: TextEncoder
    """The model trained with the best seed, ready for use: `task.classify([text])`."""
    scores: dict[str, float]
    """The scores on the evaluation rows, averaged over the seeds."""
    runs: ModelRuns
    """The individual runs. Their folders exist only if `out` was set."""


def finetune(
    model: str | Path | TextEncoder,
    train: RowSource,
    evaluation: RowSource | None = None,
    *,
    settings: FinetuningSettings = FinetuningSettings(),  # noqa: B008 - frozen
    out: str | Path | None = None,
    device: str = "auto",
    backend: str = BackendName.AUTO,
) -> FinetuneOutput:
    """Fine-tune a pretrained BERT: `qkv.finetune("bert", "train.tsv", "dev.tsv").task.classify([text])`.

    The run is saved in the folder `out`. If `out` is `None`, nothing is kept on disk.
    """
    pretrained = model if isinstance(model, TextEncoder) else load_as(TextEncoder, model)
    names = {
        "train": _row_source_name(train, "train"),
        "evaluation": None if evaluation is None else _row_source_name(evaluation, "eval"),
    }
    config = FinetuningConfig(models=(pretrained.name or "model",), **names, **dict(settings))
    evaluation_rows = None if evaluation is None else _load_labeled(evaluation, "eval", config)
    task = build_task_with_evaluation_split(config, _load_labeled(train, "train", config), evaluation_rows)
    target = resolve_device(device)
    with tempfile.TemporaryDirectory() as temporary:
        folder = RunFolder.create(Path(out or temporary)).path
        name = config.models[0]
        runs = _run_all_seeds(
            pretrained,
            task,
            config,
            name=name,
            folder=folder,
            device=target,
            reports=_no_reports,
            log=_discard,
            backend=backend,
        )
        finetuned = load_as(TextEncoder, runs.best)
    scores = {name: runs.mean(name) for name in runs.metrics}
    return FinetuneOutput(task=TextEncoder(finetuned.model, finetuned.tokenizer, name=name), scores=scores, runs=runs)


@dataclass(frozen=True, kw_only=True)
class FinetuneRun:
    """A run folder, together with its config and labeled data."""

    run: RunFolder
    settings: FinetuningConfig
    task: LabeledTask


def start_finetuning(settings: FinetuningConfig, out: Path, data: Path = Path()) -> FinetuneRun:
    """Create a run folder, and load the labeled data. Paths in `settings` are relative to `data`."""
    files = {"train": settings.train, "evaluation": settings.evaluation}
    files = {kind: str(data / name) for kind, name in files.items() if name is not None}
    settings = settings.replace(**files)
    task = load_task_with_evaluation_split(settings)
    run = RunFolder.create(out)
    paths = {kind: str(Path(name).resolve()) for kind, name in files.items()}
    write_atomically(out / CONFIG_FILE, settings.replace(**paths).to_toml().encode())
    digests = {path: hash_file(Path(path)) for path in paths.values()}
    write_atomically(out / DIGEST_FILE, json.dumps(digests, indent=1).encode())
    return FinetuneRun(run=run, settings=settings, task=task)


def open_and_verify_finetuning_run(out: Path) -> FinetuneRun:
    """Open an existing run folder, and check that its data files have not changed."""
    if not (out / CONFIG_FILE).is_file():
        raise RunError(f"{out}: not a fine-tuning run ({CONFIG_FILE} is missing)")
    settings = load_finetuning(out / CONFIG_FILE)
    for path, expected in read_json_object(out / DIGEST_FILE).items():
        if not Path(path).is_file() or hash_file(Path(path)) != expected:
            raise RunError(f"{path}: was removed or changed after {out} was created")
    return FinetuneRun(run=RunFolder(out), settings=settings, task=load_task_with_evaluation_split(settings))


def finetune_models_over_seeds(
    finetune_run: FinetuneRun,
    *,
    device: torch.device,
    reports: ReportFactory,
    log: LogFunction,
    backend: str = BackendName.AUTO,
) -> Iterator[ModelRuns]:
    """Fine-tune each model with every seed, and yield the runs of each model.

    Completed runs are not repeated, but their results are included. If the input is invalid and no checkpoint exists
    yet, the run folder is deleted.
    """
    run, settings = finetune_run.run, finetune_run.settings
    with run.locked():
        try:
            for name, folder in _folders_by_model(run.path, settings.models).items():
                pretrained = load_as(TextEncoder, name)
                yield _run_all_seeds(
                    pretrained,
                    finetune_run.task,
                    settings,
                    name=name,
                    folder=folder,
                    device=device,
                    reports=reports,
                    log=log,
                    backend=backend,
                )
        except (ConfigError, InputError, WeightsError):
            if not any(run.path.rglob("checkpoints")):
                run.discard()
            raise


def _folders_by_model(out: Path, models: Sequence[str]) -> dict[str, Path]:
    """Return a separate folder for each model so that models do not overwrite each other's results."""
    if len(models) == 1:
        return {models[0]: out}
    folders: dict[str, Path] = {}
    for name in models:
        model_folder = out / re.sub(r"[^\w.-]+", "_", name).strip("_.")
        if model_folder in folders.values():
            other = next(known_name for known_name, folder in folders.items() if folder == model_folder)
            raise InputError(
                f"{other} and {name} would be saved in the same folder {model_folder}; fine-tune them in separate runs"
            )
        folders[name] = model_folder
    return folders


def _run_all_seeds(
    pretrained: TextEncoder,
    task: LabeledTask,
    settings: FinetuningConfig,
    *,
    name: str,
    folder: Path,
    device: torch.device,
    reports: ReportFactory,
    log: LogFunction,
    backend: str = BackendName.AUTO,
) -> ModelRuns:
    def log_for_model(message: str) -> None:
        log(f"{name}: {message}")

    inputs = FinetuneInputs.tokenize_task(pretrained.model, pretrained.tokenizer, task, settings, log=log_for_model)
    evaluation_rows = task.evaluation
    if (
        len(evaluation_rows.texts) < MIN_EVALUATION_ROWS and name == settings.models[0]
    ):  # the same for all models, so reported only once
        log(
            f"{evaluation_rows.name}: the scores are unreliable because there are only {len(evaluation_rows.texts)} "
            f"evaluation rows (fewer than {MIN_EVALUATION_ROWS})"
        )
    seeds = range(settings.seed, settings.seed + settings.n_seeds)
    folders = [folder if settings.n_seeds == 1 else folder / f"seed-{seed}" for seed in seeds]
    results = []
    for seed, seed_folder in zip(seeds, folders, strict=True):
        with convert_os_errors_to_disk_error(seed_folder, 0):
            seed_folder.mkdir(parents=True, exist_ok=True)
        # The same parts are newly initialized for every seed, so they are reported only for the first seed.
        log_new_parts = log_for_model if seed == settings.seed else _discard
        result = fine_tune_or_resume(
            inputs,
            seed=seed,
            folder=seed_folder,
            device=device,
            report=reports(name, seed),
            log=log_new_parts,
            backend=backend,
        )
        results.append(result)
        _save_plots(seed_folder, result, log)
    return ModelRuns(name=name, results=results, folders=folders)


def _save_plots(folder: Path, result: FinetuneResult, log: LogFunction) -> None:
    try:
        with convert_os_errors_to_disk_error(folder, 0):
            unit = "nats per text" if result.class_names else "share of the variance"
            plot_loss_curve(folder / "metrics.jsonl", unit_label=unit).savefig(folder / "loss.png")
            if result.confusion is not None and result.class_names is not None:
                metric, score = next(iter(result.scores.items()))
                title = f"{metric} {score:.3f} on {result.n_evaluation:,} texts"
                figure = plot_confusion_matrix(np.array(result.confusion), result.class_names, title=title)
                figure.savefig(folder / "confusion.png")
    except MissingExtraError as error:
        log(str(error))


def _load_labeled(rows: RowSource, name: str, settings: FinetuningConfig) -> LabeledTexts:
    return load_labeled_rows(settings, rows) if isinstance(rows, str | Path) else labeled_texts_from_rows(name, rows)


def _row_source_name(rows: RowSource, name: str) -> str:
    return str(rows) if isinstance(rows, str | Path) else name


def _no_reports(_name: str, _seed: int) -> MetricsCallback:
    return _discard


def _discard(_message: object) -> None:
    """Ignore a message."""
