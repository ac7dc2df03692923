"""`qkv models`: what is shipped, and what has been trained here."""

import json
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli.text_tables import WIDTH, table
from qkv.errors import InputError, QKVError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from qkv.config import ModelConfig

HEAD = ("NAME", "COMMAND", "PARAMETERS", "ON DISK", "WHAT IT DOES, AND HELD-OUT SCORES")


@dataclass(frozen=True, kw_only=True)
class Found:
    """One model; a local one's name is its path."""

    name: str
    task: str
    summary: str
    parameters: int
    bytes: int
    licence: str | None
    scores: dict[str, float]
    folder: str


def models(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Where runs and models of your own lie; here and in runs/ unless said.")
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a model.")] = False,
) -> None:
    """List the shipped models and those in folders here: which command takes each, its size and its scores.

    \b
    Examples:
      qkv models
      qkv models ~/models
      qkv models --json
    """
    for folder in folders or ():
        if not folder.is_dir():
            raise InputError(f"{folder}: is no folder")
    found = [*_shipped(), *_local(folders or [Path(), Path("runs")])]
    if as_json:
        for one in found:
            print(json.dumps(asdict(one), ensure_ascii=False))
    else:
        print("\n".join(_lines(found)))


def _shipped() -> "Iterator[Found]":
    from qkv.zoo import read_card, shipped

    for folder in shipped().values():
        card = read_card(folder)
        yield Found(
            name=card.name, task=card.task, summary=card.summary, parameters=card.parameters, bytes=card.n_bytes,
            licence=card.licence, scores=card.scores, folder=str(folder),
        )  # fmt: skip


def _local(folders: list[Path]) -> "Iterator[Found]":
    """Folders of weights beside a config, and runs, whose newest checkpoint tells about them."""
    for folder in folders:
        for place in sorted(folder.iterdir()) if folder.is_dir() else ():
            newest = max(place.glob("checkpoints/step-*"), default=place)
            weights = list(newest.glob("model*.safetensors"))
            if weights and (newest / "config.json").is_file():
                yield _described(place, newest, sum(file.stat().st_size for file in weights))


def _described(place: Path, newest: Path, n_bytes: int) -> Found:
    from qkv.cli.config_lookup import config_of
    from qkv.cost import count_parameters

    task, n_parameters, scores = "–", 0, {}
    try:
        config = config_of(str(newest))
        task, n_parameters = _command(config), count_parameters(config).total
        summary, scores = ("a model's folder", {}) if newest == place else _progress(newest / "progress.json")
        scores = _judged(place / "result.json") or scores
    except (QKVError, ValueError, KeyError, TypeError) as error:
        summary = f"cannot be read: {error}"
    return Found(
        name=str(place), task=task, summary=summary, parameters=n_parameters, bytes=n_bytes, licence=None,
        scores=scores, folder=str(place),
    )  # fmt: skip


def _command(config: "ModelConfig") -> str:
    from qkv.config import BERTConfig, GPTConfig

    if isinstance(config, BERTConfig):
        return "classify" if config.n_classes else "fill" if config.masked_lm_head else "embed"
    return "generate" if isinstance(config, GPTConfig) else "translate"


def _progress(file: Path) -> tuple[str, dict[str, float]]:
    """How far a run has come, as it was saved last."""
    if not file.is_file():
        return "a run of yours", {}
    said = json.loads(file.read_text(encoding="utf-8"))
    best = said.get("best_loss")
    scores = {} if best is None else {f"validation loss, the best, at step {said['best_step']:,}": round(best, 4)}
    return f"a run of yours, {said['step']:,} steps long", scores


def _judged(file: Path) -> dict[str, float]:
    """The chief score of a fine-tuned run, which its loss says little about; none of other runs."""
    if not file.is_file():
        return {}
    said = json.loads(file.read_text(encoding="utf-8"))
    where = f"on {said['n_evaluation']:,} texts, the best, at step {said['best_step']:,}"
    chief = list(said["scores"].items())[:1]
    return {f"{measure.replace('_', ' ')} {where}": round(score, 4) for measure, score in chief}


def _lines(found: list[Found]) -> list[str]:
    head, *rows = table(
        HEAD,
        [(one.name, one.task, f"{one.parameters:,}", f"{one.bytes / 2**20:.1f} MiB", "") for one in found],
        left=2,
    )
    start = head.index(HEAD[-1])
    lines = [head]
    for row, one in zip(rows, found, strict=True):
        told = [one.summary, *(f"{value:g} {name}" for name, value in one.scores.items())]
        wrapped = [
            line for each in told for line in textwrap.wrap(each, max(30, WIDTH - start), break_on_hyphens=False)
        ]
        lines.append(f"{row:{start}}{wrapped[0]}")
        lines += [" " * start + line for line in wrapped[1:]]
    return lines
