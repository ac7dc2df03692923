"""`qkv finetune`: a pre-trained BERT and labelled texts in, a model for the task out."""

import json
import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.cli.device_options import chosen_device, next_run_folder
from qkv.cli.model_argument import shipped_names
from qkv.cli.option_checks import Context, refuse_others
from qkv.cli.progress import bars, say
from qkv.cli.text_tables import table
from qkv.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch

    from qkv.config import FinetuningConfig
    from qkv.tasks.finetune import FinetuneRun, ModelRuns
    from qkv.training.finetune import FinetuneResult
    from qkv.training.trainer import MetricsCallback


class Target(StrEnum):
    """What a label is."""

    CLASS = "class"
    SEVERAL = "several"
    SCORE = "score"


Models = Annotated[
    list[str] | None,
    typer.Argument(help="Models to fine-tune and compare, or one RECIPE.toml.", autocompletion=shipped_names),
]
Data = Annotated[
    Path | None, typer.Option(help="Training rows: .tsv, .csv or .jsonl. For a recipe: its files' folder.")
]
Evaluation = Annotated[Path | None, typer.Option("--eval", help="Rows to judge by; else a tenth is held out.")]
Text = Annotated[list[str] | None, typer.Option(help="The text's column; given twice, a pair's. By name, or from 1.")]
Label = Annotated[str | None, typer.Option(help="The label's column.")]
TargetKind = Annotated[Target, typer.Option(help="class: one a text; several: any number of them; score: a number.")]
Rows = Annotated[int | None, typer.Option(min=1, help="Learn from so many rows alone, drawn by chance.")]
Truncate = Annotated[bool, typer.Option("--truncate", help="Cut texts that are longer than the context.")]
FromScratch = Annotated[bool, typer.Option("--from-scratch", help="The same shape with random weights.")]
Freeze = Annotated[str, typer.Option(help="So many of the lowest layers learn nothing; all: only the head learns.")]
Lora = Annotated[int | None, typer.Option(min=1, help="Learn two thin matrices of this rank beside each attention's.")]
LayerDecay = Annotated[float | None, typer.Option(help="Each layer learns this much slower than the one above: 0.9.")]
Seeds = Annotated[int, typer.Option(min=1, help="Runs a model; the table has mean ± spread.")]
Seed = Annotated[int, typer.Option(min=0, help="The first seed.")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Chosen from the number of rows unless said.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Chosen from the number of rows unless said.")]
Rate = Annotated[float | None, typer.Option("--learning-rate", help="Chosen from the model's size unless said.")]
Patience = Annotated[
    int | None,
    typer.Option(min=1, help="Stop early when so many evaluations in a row (of 10 a run) found nothing better."),
]
Compile = Annotated[bool, typer.Option("--compile", help="Compile the model: slower to start, then faster.")]
Out = Annotated[Path | None, typer.Option(help="The run's folder, new or empty; else runs/1, runs/2 …")]
Resume = Annotated[Path | None, typer.Option(help="Go on with this run.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a model.")]


def finetune(
    context: Context, models: Models = None, *, data: Data = None, evaluation: Evaluation = None,
    text: Text = None, label: Label = None, target: TargetKind = Target.CLASS, rows: Rows = None,
    truncate: Truncate = False, from_scratch: FromScratch = False, freeze: Freeze = "0", lora: Lora = None,
    layer_decay: LayerDecay = None, seeds: Seeds = 1, seed: Seed = 0, epochs: Epochs = None,
    batch_size: BatchSize = None, learning_rate: Rate = None, patience: Patience = 5, compiled: Compile = False,
    out: Out = None, resume: Resume = None, device: Device = "auto", as_json: AsJson = False,
) -> None:  # fmt: skip
    """Fine-tune one or more models on labelled texts, one text or a pair a row, and print how good they are.

    A table's first row names its columns: text and label, or text_a, text_b and label (score for a number). Each run
    keeps its best checkpoint by the evaluation rows, and a confusion matrix (confusion.png). Ctrl-C stops a run so
    that --resume goes on with it. Of two classes f1 is that of the second by name, as told; f1 macro is the mean.

    \b
    Examples:
      qkv finetune bert --data train.tsv --eval dev.tsv --out run
      qkv finetune bert my-bert --data train.tsv --eval dev.tsv --seeds 3
      qkv finetune bert --data pairs.tsv --text premise --text hypothesis --label verdict
      qkv finetune bert --data sick.tsv --target score --rows 1000
      qkv finetune recipes/sentiment.toml --data texts --out sentiment
    """
    from qkv.cli.distributed import refuse_several
    from qkv.config import load_finetuning
    from qkv.tasks.finetune import resume_finetuning, start_finetuning
    from qkv.training import SignalInterrupt, raise_on_stop_signals

    where = chosen_device(device)
    refuse_several("finetune", where)
    if resume is not None:
        known = ("resume", "device", "as_json")
        refuse_others(context, known, "means nothing with --resume: a run goes on as it was")
        begun = resume_finetuning(resume)
    else:
        if models and models[0].endswith(".toml"):
            known = ("models", "data", "out", "device", "as_json")
            refuse_others(context, known, "means nothing with a recipe; its settings are changed so: epochs=2")
            settings = load_finetuning(Path(models[0]), tuple(models[1:]))
        else:
            given = {
                "text_columns": tuple(text or ()), "label_column": label, "problem_type": _PROBLEMS[target], "n_train_rows": rows,
                "truncate": truncate, "from_scratch": from_scratch, "freeze": _layers(freeze), "lora_rank": lora,
                "layer_decay": layer_decay, "n_seeds": seeds, "seed": seed, "epochs": epochs, "batch_size": batch_size,
                "learning_rate": learning_rate, "patience": patience, "compile": compiled,
            }  # fmt: skip
            settings, data = _from_options(models, data, evaluation, given), None
        begun = start_finetuning(settings, out or next_run_folder(), data or Path())
    try:
        with raise_on_stop_signals():
            _show(_runs(begun, where), as_json=as_json)
    except SignalInterrupt as stop:
        say(f"stopped by {stop.signal.name}; go on: qkv finetune --resume {begun.run.path}")
        sys.exit(128 + stop.signal)


_PROBLEMS = {Target.CLASS: "single-label", Target.SEVERAL: "multi-label", Target.SCORE: "regression"}


def _from_options(
    models: list[str] | None, data: Path | None, evaluation: Path | None, given: dict[str, Any]
) -> "FinetuningConfig":
    from qkv.config import FinetuningConfig

    if not models or data is None:
        raise InputError("which model, and on what? qkv finetune MODEL --data train.tsv --eval dev.tsv")
    held_out = None if evaluation is None else str(evaluation)
    # What was not said is left out, so that the settings' own words stand in the run's file.
    said = {name: value for name, value in given.items() if value is not None}
    return FinetuningConfig(models=tuple(models), train=str(data), evaluation=held_out, **said)


def _layers(text: str) -> int | str:
    if text == "all":
        return text
    if not text.isdigit():
        raise InputError(f"--freeze {text}: it is a number of layers, or all")
    return int(text)


def _runs(begun: "FinetuneRun", device: "torch.device") -> "Iterator[ModelRuns]":
    from qkv.tasks.finetune import run_finetuning

    with bars() as next_bar:

        def report(name: str, seed: int) -> "MetricsCallback":
            run = f"{name}, seed {seed}"
            return _reporting(run, next_bar(run))

        yield from run_finetuning(begun, device=device, reports=report, say=say)


def _reporting(run: str, move: "Callable[[int, int], None]") -> "MetricsCallback":
    def report(entry: "Mapping[str, Any]") -> None:
        if "validation_loss" not in entry:
            move(entry["step"], entry["of"])
            return
        measures = {name.removeprefix("validation_"): entry[name] for name in entry if name.startswith("validation_")}
        shown = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in measures.items())
        say(f"{run}: step {entry['step']:,} of {entry['of']:,}: {shown}{' (best so far)' if entry['is_best'] else ''}")

    return report


def _show(runs: "Iterable[ModelRuns]", *, as_json: bool) -> None:
    """JSON as each model is done; a table when all are."""
    done = []
    for one in runs:
        say(f"{one.name}: {_told(one.results[0])}")
        say(f'try it: qkv classify {one.best} "…"')
        done.append(one)
        if as_json:
            print(json.dumps(_record(one)), flush=True)
    if not as_json:
        measures = done[0].metrics
        names = done[0].results[0].class_names or []
        head = ["model", "parameters", *(_column(measure, names) for measure in measures), "seconds"]
        print("\n".join(table(head, [_row(one) for one in done])))


def _told(first: "FinetuneResult") -> str:
    made, planned = first.epochs_completed, first.epochs
    epochs = f"{planned} epoch{'' if planned == 1 else 's'}"
    if first.steps < (first.planned_steps or 0):
        epochs = (
            f"stopped early, after {made:.1f} of {epochs}: nothing was better than step {first.best_step:,} "
            f"(--patience)"
        )
    return f"{first.n_train:,} rows, {epochs}, learning rate {first.learning_rate:.2g}"


def _column(measure: str, class_names: "Sequence[str]") -> str:
    """Of two classes, F1 is one class's: it is said whose."""
    return f"f1 of {class_names[1]}" if measure == "f1" else measure.replace("_", " ")


def _row(one: "ModelRuns") -> list[str]:
    scores = []
    for measure in one.metrics:
        spread = f" ± {one.spread(measure):.4f}" if len(one.results) > 1 else ""
        scores.append(f"{one.mean(measure):.4f}{spread}")
    seconds = sum(result.seconds for result in one.results) / len(one.results)
    return [one.name, f"{one.results[0].n_parameters:,}", *scores, f"{seconds:.1f}"]


def _record(one: "ModelRuns") -> dict[str, Any]:
    means = {measure: {"mean": one.mean(measure), "spread": one.spread(measure)} for measure in one.metrics}
    return {"model": one.name, "scores": means, "best": str(one.best), "runs": [asdict(run) for run in one.results]}
