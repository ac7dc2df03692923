"""Training from Python: a recipe or a text in, the folder of a finished run out."""

from pathlib import Path

from qkv.config import Recipe, load_recipe
from qkv.data.sources import Progress
from qkv.errors import RunError
from qkv.models import Model
from qkv.tasks.devices import find_device
from qkv.tasks.loading import load_weights
from qkv.training import (
    Pace,
    Prepared,
    build_trainer,
    choose_recipe,
    finish_preparing,
    fit_to_time,
    open_run,
    own_recipe,
    prepare_run,
    write_recipe,
)
from qkv.training.trainer import Report

USUAL_MINUTES = 5.0
"""For a text, whose recipe says no steps."""


def train(
    what: Recipe | str | Path, out: str | Path, *, minutes: float | None = None, data: str | Path = ".",
    device: str = "auto", report: Report = lambda _entry: None,
) -> Path:  # fmt: skip
    """What `qkv train` does, without a word: `qkv.load(qkv.train("book.txt", "run", minutes=5))`.

    `what`: a text file or a folder of them, for a GPT whose settings are chosen; or a recipe, or the name of its .toml.
    `minutes`: as many steps as fit; 5 minutes of a text unless said. `data`: the folder that a recipe's files lie in.
    `report` gets every line of metrics.jsonl as it comes. Where `out` holds a run of the same it goes on, with the
    numbers of an unbroken one. Ctrl-C stops it after a step, with a checkpoint, and raises nothing.
    """
    where = find_device(device)
    if isinstance(what, Recipe) or Path(what).suffix == ".toml":
        recipe = what if isinstance(what, Recipe) else load_recipe(what)
    else:
        minutes = USUAL_MINUTES if minutes is None else minutes
        recipe = own_recipe([str(what)], choose_recipe, seconds=60 * minutes, device=where)
    seconds = None if minutes is None else 60 * minutes
    pace = None
    if (Path(out) / "recipe.toml").is_file():
        prepared = _opened(Path(out), recipe, is_timed=seconds is not None)
    else:
        prepared = prepare_run(recipe, Path(out), Path(data), progress=_unseen, seconds=seconds)
        if seconds is not None:
            prepared = fit_to_time(prepared, device=where, seconds=seconds)
            pace = Pace(seconds, keep=lambda plan: write_recipe(prepared.run, prepared.recipe.replace(training=plan)))
        finish_preparing(prepared)
    with prepared.run.locked():
        trainer = build_trainer(prepared, device=where, report=report, start=_first_weights(prepared))
        trainer.resume(lambda _said: None)
        trainer.train(pace)
    return prepared.run.path


def _unseen(_label: str) -> Progress:
    return lambda _done, _all: None


def _opened(out: Path, recipe: Recipe, *, is_timed: bool) -> Prepared:
    """`is_timed`: its steps are what fitted, and for a text its shape is, too."""
    prepared = open_run(out)
    found = prepared.recipe
    is_same = (found.family, found.data) == (recipe.family, recipe.data) if is_timed else found == recipe
    if not is_same:
        raise RunError(f"{out}: holds a run of another recipe; go on with it: qkv train --resume {out}")
    return prepared


def _first_weights(prepared: Prepared) -> Model | None:
    start = prepared.recipe.start_from
    return None if start is None or prepared.run.steps() else load_weights(start).model
