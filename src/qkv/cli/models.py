"""The `qkv models` command."""

import json
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli.options import resolve_model_config
from qkv.cli.output import TERMINAL_WIDTH, format_table
from qkv.errors import InputError, QKVError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from qkv.config import ModelConfig

MODELS_TABLE_HEADER = ("NAME", "COMMAND", "PARAMETERS", "ON DISK", "DESCRIPTION AND HELD-OUT SCORES")


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """An entry in the list of models. A local model has its path as its name."""

    name: str
    task: str
    summary: str
    parameters: int
    bytes: int
    license: str | None
    scores: dict[str, float]
    folder: str


def models(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders to search for runs and models. By default, the current folder and runs/."),
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per model.")] = False,
) -> None:
    """List the shipped models, and the runs and models in local folders.

    For each model, prints a command that uses it, its size and its scores.

    \b
    Examples:
      qkv models
      qkv models ~/models
      qkv models --json
    """
    for folder in folders or ():
        if not folder.is_dir():
            raise InputError(f"{folder}: must be an existing folder")
    entries = [*_shipped_models(), *_local_models(folders or [Path(), Path("runs")])]
    if as_json:
        for entry in entries:
            print(json.dumps(asdict(entry), ensure_ascii=False))
    else:
        print("\n".join(_format_entries(entries)))


def _shipped_models() -> "Iterator[ModelEntry]":
    from qkv.zoo import read_model_card, shipped_model_folders

    for folder in shipped_model_folders().values():
        card = read_model_card(folder)
        yield ModelEntry(
            name=card.name,
            task=card.task,
            summary=card.summary,
            parameters=card.parameters,
            bytes=card.n_bytes,
            license=card.license,
            scores=card.scores,
            folder=str(folder),
        )


def _local_models(folders: list[Path]) -> "Iterator[ModelEntry]":
    """Yield an entry for each run and for each model folder, which contains weights and a config.

    The description of a run is based on its newest checkpoint.
    """
    for parent in folders:
        for folder in sorted(parent.iterdir()) if parent.is_dir() else ():
            newest_checkpoint = max(folder.glob("checkpoints/step-*"), default=folder)
            weights = list(newest_checkpoint.glob("model*.safetensors"))
            if weights and (newest_checkpoint / "config.json").is_file():
                yield _describe_local_model(folder, newest_checkpoint, sum(file.stat().st_size for file in weights))


def _describe_local_model(folder: Path, newest_checkpoint: Path, n_bytes: int) -> ModelEntry:
    from qkv.cost import count_parameters

    task, n_parameters, scores = "–", 0, {}
    try:
        config = resolve_model_config(str(newest_checkpoint))
        task, n_parameters = _command_for_model(config), count_parameters(config).total
        summary, scores = (
            ("model folder", {})
            if newest_checkpoint == folder
            else _read_run_description_and_best_loss(newest_checkpoint / "progress.json")
        )
        scores = _read_main_finetune_metric(folder / "result.json") or scores
    except (QKVError, ValueError, KeyError, TypeError) as error:
        summary = f"cannot be read: {error}"
    return ModelEntry(
        name=str(folder),
        task=task,
        summary=summary,
        parameters=n_parameters,
        bytes=n_bytes,
        license=None,
        scores=scores,
        folder=str(folder),
    )


def _command_for_model(config: "ModelConfig") -> str:
    from qkv.config import BERTConfig, GPTConfig

    if isinstance(config, BERTConfig):
        return "classify" if config.n_classes else "fill" if config.masked_lm_head else "embed"
    return "generate" if isinstance(config, GPTConfig) else "translate"


def _read_run_description_and_best_loss(progress_file: Path) -> tuple[str, dict[str, float]]:
    """Read the description of a run and its best validation loss from the newest checkpoint."""
    if not progress_file.is_file():
        return "local run", {}
    progress = json.loads(progress_file.read_text(encoding="utf-8"))
    loss = progress.get("best_loss")
    scores = {} if loss is None else {f"best validation loss (step {progress['best_step']:,})": round(loss, 4)}
    return f"local run, {progress['step']:,} steps", scores


def _read_main_finetune_metric(result_file: Path) -> dict[str, float]:
    """Return the main metric of a fine-tuning run, or {} for other runs.

    This metric is more informative than the loss.
    """
    if not result_file.is_file():
        return {}
    result = json.loads(result_file.read_text(encoding="utf-8"))
    note = f"on {result['n_evaluation']:,} texts (best, step {result['best_step']:,})"
    main_metric = list(result["scores"].items())[:1]
    return {f"{metric.replace('_', ' ')} {note}": round(score, 4) for metric, score in main_metric}


def _format_entries(entries: list[ModelEntry]) -> list[str]:
    header, *rows = format_table(
        MODELS_TABLE_HEADER,
        [(entry.name, entry.task, f"{entry.parameters:,}", f"{entry.bytes / 2**20:.1f} MiB", "") for entry in entries],
        n_left_aligned=2,
    )
    start = header.index(MODELS_TABLE_HEADER[-1])
    lines = [header]
    for row, entry in zip(rows, entries, strict=True):
        paragraphs = [entry.summary, *(f"{value:g} {name}" for name, value in entry.scores.items())]
        wrapped = [
            line
            for paragraph in paragraphs
            for line in textwrap.wrap(paragraph, max(30, TERMINAL_WIDTH - start), break_on_hyphens=False)
        ]
        lines.append(f"{row:{start}}{wrapped[0]}")
        lines += [" " * start + line for line in wrapped[1:]]
    return lines
