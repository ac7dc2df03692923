"""Training from Python: a recipe or a text in, the folder of a finished run out."""

from pathlib import Path

from qkv.config import Recipe, load_recipe
from qkv.data.text_sources import Progress
from qkv.errors import InputError, RunError
from qkv.models import Model
from qkv.tasks.devices import resolve_device
from qkv.tasks.loader import load_pretrained
from qkv.training import (
    DEFAULT_MINUTES,
    TimeBudget,
    PreparedRun,
    build_trainer,
    choose_gpt_recipe,
    finish_preparation,
    fit_run_to_time,
    open_run,
    auto_recipe,
    prepare_run,
    with_steps,
    write_recipe,
)
from qkv.training.trainer import Report


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
    if minutes is not None and minutes <= 0:
        raise InputError(f"minutes={minutes} must be more than 0")
    where = resolve_device(device)
    is_text = not isinstance(what, Recipe) and Path(what).suffix != ".toml"
    if is_text:
        minutes = DEFAULT_MINUTES if minutes is None else minutes
        recipe = auto_recipe([str(what)], choose_gpt_recipe, seconds=60 * minutes, device=where)
    else:
        recipe = what if isinstance(what, Recipe) else load_recipe(what)
    seconds = None if minutes is None else 60 * minutes
    is_new, pace = not (Path(out) / "recipe.toml").is_file(), None
    if is_new:
        prepared = prepare_run(recipe, Path(out), Path(data), progress=_no_progress, seconds=seconds)
    else:
        prepared = _reopen_run(Path(out), recipe, is_text=is_text, is_timed=seconds is not None)
    with prepared.run.locked():
        if is_new and seconds is not None:
            prepared = fit_run_to_time(prepared, device=where, seconds=seconds)
            pace = TimeBudget(seconds, keep=lambda plan: write_recipe(prepared.run, prepared.recipe.replace(training=plan)))
        if is_new:
            finish_preparation(prepared)
        trainer = build_trainer(prepared, device=where, report=report, start=_load_initial_model(prepared))
        trainer.resume(lambda _said: None)
        trainer.train(pace)
    return prepared.run.path


def _no_progress(_label: str) -> Progress:
    return lambda _done, _all: None


def _reopen_run(out: Path, recipe: Recipe, *, is_text: bool, is_timed: bool) -> PreparedRun:
    """`is_text`: its settings are what suited the time and the machine then; `is_timed`: its steps are what fitted."""
    prepared = open_run(out)
    found = prepared.recipe
    if is_text:
        is_same = (found.family, found.data) == (recipe.family, recipe.data)
    elif is_timed:
        is_same = _with_fixed_steps(found, found.training.steps) == _with_fixed_steps(recipe, found.training.steps)
    else:
        is_same = found == recipe
    if not is_same:
        raise RunError(f"{out}: holds a run of another recipe; go on with it: qkv train --resume {out}")
    return prepared


def _with_fixed_steps(recipe: Recipe, steps: int) -> Recipe:
    made = with_steps(recipe, steps)
    return made.replace(training=made.training.replace(replans=()))


def _load_initial_model(prepared: PreparedRun) -> Model | None:
    start = prepared.recipe.init_from
    return None if start is None or prepared.run.checkpoint_steps() else load_pretrained(start).model
