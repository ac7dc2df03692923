"""The `qkv finetune` command."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from qkv.choices import BackendName, ProblemType
from qkv.cli.options import (
    BackendOption,
    Context,
    DeviceOption,
    complete_shipped_names,
    next_run_folder,
    reject_other_options,
    select_device,
)
from qkv.cli.output import format_table, print_status, sequential_progress_bars
from qkv.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch

    from qkv.config import FinetuningConfig
    from qkv.tasks.finetune import FinetuneRun, ModelRuns
    from qkv.training.finetune import FinetuneResult
    from qkv.training.loop import MetricsCallback


def finetune(
    context: Context,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Models to fine-tune and compare, or the path to a recipe (RECIPE.toml).",
            autocompletion=complete_shipped_names,
        ),
    ] = None,
    *,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Training data (.tsv, .csv or .jsonl). With a recipe, the folder that contains its data files."
        ),
    ] = None,
    evaluation: Annotated[
        Path | None,
        typer.Option("--eval", help="Evaluation data. By default, 10% of the training data is held out."),
    ] = None,
    text_column: Annotated[
        list[str] | None,
        typer.Option(help="Name or number of the text column. For pairs of texts, give this option twice."),
    ] = None,
    label_column: Annotated[str | None, typer.Option(help="Name or number of the label column.")] = None,
    problem_type: Annotated[
        ProblemType,
        typer.Option(
            help="Type of problem: one label per text, any number of labels per text, or regression (a number per "
            "text)."
        ),
    ] = ProblemType.SINGLE_LABEL,
    max_train_rows: Annotated[
        int | None, typer.Option(min=1, help="Train on a random sample of this many rows.")
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Truncate texts that exceed the context length instead of failing.")
    ] = False,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Start from random weights instead of the pre-trained weights.")
    ] = False,
    freeze: Annotated[
        str,
        typer.Option(
            metavar="N|all", help="Freeze the lowest N layers. With `all`, train only the classification head."
        ),
    ] = "0",
    lora_rank: Annotated[
        int | None, typer.Option(min=1, help="Train LoRA adapters of this rank in the attention layers.")
    ] = None,
    layer_decay: Annotated[
        float | None,
        typer.Option(
            help="Multiply the learning rate of each layer by this factor (such as 0.9) to get the learning rate of "
            "the layer below."
        ),
    ] = None,
    seeds: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of runs per model, each with a different seed. The table shows the mean ± standard deviation.",
        ),
    ] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the first run.")] = 0,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Number of epochs. The default depends on the number of rows.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Batch size. The default depends on the number of rows.")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Learning rate. The default depends on the model size.")
    ] = None,
    patience: Annotated[
        int | None,
        typer.Option(
            min=1, help="Stop early after this many evaluations without improvement. There are 10 evaluations per run."
        ),
    ] = 5,
    compile_model: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Compile the model with torch.compile, which takes time at the start but speeds up training.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Run folder. Must be new or empty. Default: the first unused folder among runs/1, runs/2, …"),
    ] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Resume the run in this folder.")] = None,
    device: DeviceOption = "auto",
    backend: BackendOption = BackendName.AUTO,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per model.")] = False,
) -> None:
    """Fine-tune one or more models on labeled texts or pairs of texts, and print their scores.

    The data must have a header. The default columns are text and label, or text_a, text_b and label for pairs. With
    --problem-type regression, the default label column is score. Each run keeps the checkpoint with the best result on
    the evaluation data. If each text has one label, the run also saves a confusion matrix (confusion.png). Press Ctrl-C
    to interrupt a run, and use --resume to continue it. For two classes, f1 is the score of the class named in its
    column title, and f1 macro is the mean over both classes.

    \b
    Examples:
      qkv finetune bert --data train.tsv --eval dev.tsv --out run
      qkv finetune bert my-bert --data train.tsv --eval dev.tsv --seeds 3
      qkv finetune bert --data pairs.tsv --text-column premise --text-column hypothesis --label-column verdict
      qkv finetune bert --data sick.tsv --problem-type regression --max-train-rows 1000
      qkv finetune recipes/sentiment.toml --data texts --out sentiment
    """
    from qkv.cli.process import require_single_process, retain_freed_memory
    from qkv.config import load_finetuning
    from qkv.tasks.finetune import open_and_verify_finetuning_run, start_finetuning
    from qkv.training import SignalInterrupt, raise_on_stop_signals

    torch_device = select_device(device)
    require_single_process("finetune", torch_device)
    if torch_device.type == "cpu":
        retain_freed_memory()  # training is faster if the memory of large tensors is not returned to the system
    if resume is not None:
        allowed = ("resume", "device", "backend", "as_json")
        reject_other_options(context, allowed, "cannot be combined with --resume, which keeps the settings of the run")
        finetune_run = open_and_verify_finetuning_run(resume)
    else:
        if models and models[0].endswith(".toml"):
            allowed = ("models", "data", "out", "device", "backend", "as_json")
            reject_other_options(
                context, allowed, "cannot be combined with a recipe; to override a setting, use for example: epochs=2"
            )
            config = load_finetuning(Path(models[0]), tuple(models[1:]))
        else:
            settings = {
                "text_columns": tuple(text_column or ()),
                "label_column": label_column,
                "problem_type": problem_type,
                "n_train_rows": max_train_rows,
                "truncate": truncate,
                "from_scratch": from_scratch,
                "freeze": _parse_freeze(freeze),
                "lora_rank": lora_rank,
                "layer_decay": layer_decay,
                "n_seeds": seeds,
                "seed": seed,
                "epochs": epochs,
                "batch_size": batch_size,
                "learning_rate": learning_rate,
                "patience": patience,
                "compile": compile_model,
            }
            config, data = _build_finetuning_config(models, data, evaluation, settings), None
        finetune_run = start_finetuning(config, out or next_run_folder(), data or Path())
    try:
        with raise_on_stop_signals():
            _print_results(_finetune_models_with_progress(finetune_run, torch_device, backend), as_json=as_json)
    except SignalInterrupt as stop:
        print_status(f"stopped by {stop.signal.name}; resume with: qkv finetune --resume {finetune_run.run.path}")
        sys.exit(128 + stop.signal)


def _build_finetuning_config(
    models: list[str] | None, data: Path | None, evaluation: Path | None, settings: dict[str, Any]
) -> "FinetuningConfig":
    from qkv.config import FinetuningConfig

    if not models or data is None:
        raise InputError(
            "a model and --data are required, for example: qkv finetune MODEL --data train.tsv --eval dev.tsv"
        )
    evaluation_file = None if evaluation is None else str(evaluation)
    # Unset options are omitted so that FinetuningConfig sets their default values in the run's config file.
    given_settings = {name: value for name, value in settings.items() if value is not None}
    return FinetuningConfig(models=tuple(models), train=str(data), evaluation=evaluation_file, **given_settings)


def _parse_freeze(text: str) -> Literal["all"] | int:
    if text == "all":
        return "all"
    if not text.isdigit():
        raise InputError(f"--freeze {text}: must be a number of layers, or all")
    return int(text)


def _finetune_models_with_progress(
    finetune_run: "FinetuneRun", device: "torch.device", backend: BackendName
) -> "Iterator[ModelRuns]":
    from qkv.tasks.finetune import finetune_models_over_seeds

    with sequential_progress_bars() as start_bar:

        def make_report(name: str, seed: int) -> "MetricsCallback":
            run_name = f"{name}, seed {seed}"
            return _progress_and_evaluation_callback(run_name, start_bar(run_name))

        yield from finetune_models_over_seeds(
            finetune_run, device=device, reports=make_report, log=print_status, backend=backend
        )


def _progress_and_evaluation_callback(run_name: str, update_bar: "Callable[[int, int], None]") -> "MetricsCallback":
    """Return a callback that advances the progress bar after each step and prints the metrics of each evaluation."""

    def report(entry: "Mapping[str, Any]") -> None:
        if "validation_loss" not in entry:
            update_bar(entry["step"], entry["total_steps"])
            return
        metrics = {name.removeprefix("validation_"): entry[name] for name in entry if name.startswith("validation_")}
        formatted = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in metrics.items())
        best = " (best so far)" if entry["is_best"] else ""
        print_status(f"{run_name}: step {entry['step']:,} of {entry['total_steps']:,}: {formatted}{best}")

    return report


def _print_results(runs: "Iterable[ModelRuns]", *, as_json: bool) -> None:
    """Print JSON as soon as each model is finished, or print a table after the last model."""
    finished = []
    for model_runs in runs:
        print_status(f"{model_runs.name}: {_describe_training(model_runs.results[0])}")
        print_status(f'try it with: qkv classify {model_runs.best} "…"')
        finished.append(model_runs)
        if as_json:
            print(json.dumps(_model_runs_to_dict(model_runs)), flush=True)
    if not as_json:
        metrics = finished[0].metrics
        class_names = finished[0].results[0].class_names or []
        header = ["model", "parameters", *(_metric_title(metric, class_names) for metric in metrics), "seconds"]
        print("\n".join(format_table(header, [_mean_scores_row(model_runs) for model_runs in finished])))


def _describe_training(result: "FinetuneResult") -> str:
    epochs = f"{result.epochs} epoch{'' if result.epochs == 1 else 's'}"
    if result.steps < (result.planned_steps or 0):
        epochs = (
            f"stopped early after {result.epochs_completed:.1f} of {epochs} because there was no improvement after "
            f"step {result.best_step:,} (--patience)"
        )
    return f"{result.n_train:,} rows, {epochs}, learning rate {result.learning_rate:.2g}"


def _metric_title(metric: str, class_names: "Sequence[str]") -> str:
    """Return the column title of a metric. For two classes, the title of f1 includes the name of its class."""
    return f"f1 of {class_names[1]}" if metric == "f1" else metric.replace("_", " ")


def _mean_scores_row(model_runs: "ModelRuns") -> list[str]:
    scores = []
    for metric in model_runs.metrics:
        std = f" ± {model_runs.std(metric):.4f}" if len(model_runs.results) > 1 else ""
        scores.append(f"{model_runs.mean(metric):.4f}{std}")
    seconds = sum(result.seconds for result in model_runs.results) / len(model_runs.results)
    return [model_runs.name, f"{model_runs.results[0].n_parameters:,}", *scores, f"{seconds:.1f}"]


def _model_runs_to_dict(model_runs: "ModelRuns") -> dict[str, Any]:
    scores = {metric: {"mean": model_runs.mean(metric), "std": model_runs.std(metric)} for metric in model_runs.metrics}
    return {
        "model": model_runs.name,
        "scores": scores,
        "best": str(model_runs.best),
        "runs": [asdict(result) for result in model_runs.results],
    }
