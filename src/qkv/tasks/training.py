"""Training from Python: a recipe in, the folder of a finished run out."""

from pathlib import Path

from qkv.config import Recipe, load_recipe
from qkv.errors import RunError
from qkv.models import Model
from qkv.tasks.devices import find_device
from qkv.tasks.loading import load_weights
from qkv.training import Prepared, build_trainer, finish_preparing, open_run, prepare_run
from qkv.training.trainer import Report


def train(
    recipe: Recipe | str | Path, out: str | Path, *, data: str | Path = ".", device: str = "auto",
    report: Report = lambda _entry: None,
) -> Path:  # fmt: skip
    """What `qkv train RECIPE.toml` does, without a word: `qkv.load(qkv.train(recipe, "run"))`.

    `data`: the folder that the recipe's files lie in. `report` gets every line of metrics.jsonl as it comes. Where
    `out` holds a run of this recipe it goes on, with the numbers of an unbroken one. Ctrl-C stops it after a step, with
    a checkpoint, and raises nothing.
    """
    where = find_device(device)
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    prepared = _ready(recipe, Path(out), Path(data))
    with prepared.run.locked():
        trainer = build_trainer(prepared, device=where, report=report, start=_first_weights(prepared))
        trainer.resume(lambda _said: None)
        trainer.train()
    return prepared.run.path


def _ready(recipe: Recipe, out: Path, data: Path) -> Prepared:
    if not (out / "recipe.toml").is_file():
        prepared = prepare_run(recipe, out, data, progress=lambda _label: lambda _done, _all: None)
        finish_preparing(prepared)
        return prepared
    prepared = open_run(out)
    if prepared.recipe != recipe:
        raise RunError(f"{out}: holds a run of another recipe; go on with it: qkv train --resume {out}")
    return prepared


def _first_weights(prepared: Prepared) -> Model | None:
    start = prepared.recipe.start_from
    return None if start is None or prepared.run.steps() else load_weights(start).model
