"""Train models from Python."""

from pathlib import Path

from qkv.choices import BackendName
from qkv.config import Recipe, load_recipe
from qkv.data.documents import ProgressCallback
from qkv.errors import InputError, RunError
from qkv.models import Model
from qkv.tasks.loader import load_pretrained
from qkv.training import (
    DEFAULT_MINUTES,
    PreparedRun,
    TimeBudgetReplanner,
    auto_recipe,
    build_trainer,
    choose_gpt_recipe_except_steps,
    fit_run_to_time,
    open_run,
    prepare_run,
    with_steps_and_scaled_intervals,
    write_fingerprints_and_final_recipe,
    write_recipe,
)
from qkv.training.loop import MetricsCallback
from qkv.utils import resolve_device


def train(
    recipe_or_text: Recipe | str | Path,
    out: str | Path,
    *,
    minutes: float | None = None,
    data: str | Path = ".",
    device: str = "auto",
    backend: str = BackendName.AUTO,
    report: MetricsCallback = lambda _entry: None,
) -> Path:
    """Train a model and return its run folder: `qkv.load(qkv.train("book.txt", "run", minutes=5))`.

    `recipe_or_text` is either a recipe (an object or the path of a .toml file), or a text file or folder of text files.
    For text, a GPT is trained with automatically chosen settings. `minutes` limits the training time and defaults to 5
    for text. `data` is the folder that contains the recipe's files. `report` is called with each entry of
    metrics.jsonl. If `out` already contains a run with the same recipe, training resumes and produces the same results
    as an uninterrupted run. Ctrl-C stops training after the current step and saves a checkpoint without raising an
    exception.
    """
    if minutes is not None and minutes <= 0:
        raise InputError(f"minutes must be greater than 0, got {minutes}")
    torch_device = resolve_device(device)
    is_text = not isinstance(recipe_or_text, Recipe) and Path(recipe_or_text).suffix != ".toml"
    if is_text:
        minutes = DEFAULT_MINUTES if minutes is None else minutes
        recipe = auto_recipe(
            [str(recipe_or_text)], choose_gpt_recipe_except_steps, seconds=60 * minutes, device=torch_device
        )
    else:
        recipe = recipe_or_text if isinstance(recipe_or_text, Recipe) else load_recipe(recipe_or_text)
    seconds = None if minutes is None else 60 * minutes
    is_new, time_budget = not (Path(out) / "recipe.toml").is_file(), None
    if is_new:
        prepared = prepare_run(recipe, Path(out), Path(data), progress=_no_progress, seconds=seconds)
    else:
        prepared = _open_run_with_same_recipe(Path(out), recipe, is_text=is_text, ignore_steps=seconds is not None)
    with prepared.run.locked():
        if is_new and seconds is not None:
            prepared = fit_run_to_time(prepared, device=torch_device, seconds=seconds, backend=backend)
            time_budget = TimeBudgetReplanner(
                seconds, on_replan=lambda plan: write_recipe(prepared.run, prepared.recipe.replace(training=plan))
            )
        if is_new:
            write_fingerprints_and_final_recipe(prepared)
        trainer = build_trainer(
            prepared, device=torch_device, report=report, start=_load_initial_model(prepared), backend=backend
        )
        trainer.resume(lambda _message: None)
        trainer.train(time_budget)
    return prepared.run.path


def _no_progress(_label: str) -> ProgressCallback:
    return lambda _done, _all: None


def _open_run_with_same_recipe(out: Path, recipe: Recipe, *, is_text: bool, ignore_steps: bool) -> PreparedRun:
    """Open an existing run, and check that its recipe matches `recipe`.

    If `is_text` is set, only the family and the data must match because the other settings depend on the training time
    and the machine. If `ignore_steps` is set, the number of steps may differ.
    """
    prepared = open_run(out)
    existing = prepared.recipe
    if is_text:
        is_same = (existing.family, existing.data) == (recipe.family, recipe.data)
    elif ignore_steps:
        is_same = _with_fixed_steps(existing, existing.training.steps) == _with_fixed_steps(
            recipe, existing.training.steps
        )
    else:
        is_same = existing == recipe
    if not is_same:
        raise RunError(
            f"{out}: already contains a run with a different recipe; to resume that run, use: qkv train --resume {out}"
        )
    return prepared


def _with_fixed_steps(recipe: Recipe, steps: int) -> Recipe:
    adjusted = with_steps_and_scaled_intervals(recipe, steps)
    return adjusted.replace(training=adjusted.training.replace(replans=()))


def _load_initial_model(prepared: PreparedRun) -> Model | None:
    start = prepared.recipe.init_from
    return None if start is None or prepared.run.checkpoint_steps() else load_pretrained(start).model
