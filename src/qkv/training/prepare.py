"""From a recipe to a trainer: data made ready, model built, killed preparations taken up again."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from qkv.config import ModelConfig, Recipe, load_recipe
from qkv.config.base import Config
from qkv.data.disk import write_whole, writing
from qkv.errors import ConfigError, InputError, RunError
from qkv.models import Model, build
from qkv.text import tokenizer_files
from qkv.training.choosing import fit_steps
from qkv.training.families import family_of
from qkv.training.family import Bars, Corpus
from qkv.training.lora import add_lora
from qkv.training.ranks import ALONE, Ranks
from qkv.training.recompute import recompute_blocks
from qkv.training.run import RunFolder
from qkv.training.same_data import check_data, note_data
from qkv.training.texts import resolve
from qkv.training.trainer import Report, Trainer
from qkv.training.translation import PairsCorpus
from qkv.weights.models import SOURCE_TOKENIZER

RECIPE = "recipe.toml"
PREPARING = "preparing.json"
DATA = "data"
FEW_BATCHES = 4
"""A text of fewer is read whole every few steps, and learnt by heart before anything else is."""
FEW_HELD_OUT = 500
"""Tokens. −log p differs by about 2 nats from one to the next, so the mean of fewer is off by 0.1 and more."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run folder whose tokenizer and stores are there."""

    run: RunFolder
    recipe: Recipe
    corpus: Corpus

    @property
    def config(self) -> ModelConfig:
        """The model's, now that the tokenizer's size is known."""
        return self.recipe.model_config_for(self.corpus.tokenizer.vocab_size)

    @property
    def too_few(self) -> str:
        """What there is so little of that the run says little; empty where there is enough."""
        n_train, n_held_out = self.corpus.n_tokens
        a_batch = self.recipe.training.batch_size * self.recipe.training.seq_len
        found = []
        if n_train < FEW_BATCHES * a_batch:
            few = f"{n_train:,} tokens are less than {FEW_BATCHES} batches of {a_batch:,}"
            found.append(f"{few}: the model will soon know them by heart")
        if 0 < n_held_out < FEW_HELD_OUT:
            found.append(f"{n_held_out:,} held out are below {FEW_HELD_OUT}: the validation loss will say little")
        return "; ".join(found)


class Preparing(Config):
    """What making a run ready needs besides its recipe; kept until it is, so that a killed one can go on."""

    data: str
    """The folder that the recipe's files lie in."""
    seconds: float | None = None
    """The time that the recipe's steps are still to be fitted to."""


def prepare_run(
    recipe: Recipe, folder: Path, data_folder: Path, *, progress: Bars, seconds: float | None = None
) -> Prepared:
    """Write the recipe, train or load the tokenizer, tokenize the texts; `progress(label)` gives a bar to move.

    `seconds` is noted for whoever fits the steps; `finish_preparing` ends it. Bad input leaves no folder.
    """
    resolve((*recipe.data.train, *recipe.data.validation), data_folder)
    run = RunFolder.create(folder)
    state = Preparing(data=str(data_folder.resolve()), seconds=seconds)
    write_whole(run.path / PREPARING, state.model_dump_json().encode())
    write_recipe(run, recipe)
    try:
        with run.locked():
            return go_on_preparing(run.path, progress=progress)
    except (ConfigError, InputError):
        run.discard()
        raise


def preparing(folder: Path) -> Preparing | None:
    """How the run's preparation was meant, if it is not finished."""
    path = folder / PREPARING
    try:
        return Preparing(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None
    except (OSError, ValueError, TypeError, ConfigError) as error:
        raise RunError(f"{path}: not what a run needs to go on: {error}") from None


def go_on_preparing(folder: Path, *, progress: Bars) -> Prepared:
    """What is there already is kept: the tokenizer, finished shards."""
    state, recipe = preparing(folder), _read_recipe(folder)
    assert state is not None
    family_of(recipe.family).prepare(recipe, folder / DATA, Path(state.data), progress=progress)
    return _open(folder, recipe)


def fit_to_time(prepared: Prepared, *, device: torch.device, seconds: float, ranks: Ranks = ALONE) -> Prepared:
    """With as many steps as fit: a few are timed on a throw-away model."""
    trainer = build_trainer(prepared, device=device, report=lambda _entry: None, ranks=ranks)
    recipe = fit_steps(prepared.recipe, seconds=seconds, seconds_a_step=trainer.seconds_a_step())
    return replace(prepared, recipe=recipe)


def finish_preparing(prepared: Prepared) -> None:
    """From now on the run is what its recipe says, and can be resumed without the texts."""
    note_data(prepared.run.path, prepared.run.path / DATA)
    write_recipe(prepared.run, prepared.recipe)
    with writing(prepared.run.path, 0):
        (prepared.run.path / PREPARING).unlink(missing_ok=True)


def open_run(folder: Path) -> Prepared:
    """A run that was prepared before, and whose data are what they were then."""
    recipe = _read_recipe(folder)
    if preparing(folder) is not None:
        raise RunError(f"{folder}: was stopped while it was prepared; go on: qkv train --resume {folder}")
    check_data(folder)
    return _open(folder, recipe)


def made_by_another(folder: Path) -> Prepared:
    """The same run as `prepare_run` gave to the process that called it."""
    return _open(folder, _read_recipe(folder))


def _open(folder: Path, recipe: Recipe) -> Prepared:
    corpus = family_of(recipe.family).open(recipe, folder / DATA)
    return Prepared(run=RunFolder(folder), recipe=recipe, corpus=corpus)


def _read_recipe(folder: Path) -> Recipe:
    if not (folder / RECIPE).is_file():
        raise RunError(f"{folder}: holds no {RECIPE}, so it is no run to go on with")
    return load_recipe(folder / RECIPE)


def build_trainer(
    prepared: Prepared, *, device: torch.device, report: Report, start: Model | None = None, ranks: Ranks = ALONE
) -> Trainer:
    """`start`: a model to begin with; it must have the recipe's shape. `ranks`: who shares the work."""
    training, corpus = ranks.fitted(prepared.recipe.training), prepared.corpus
    model = build(prepared.config, seed=training.seed)
    if start is not None:
        _copy(start, model)
    if training.checkpoint_activations:
        recompute_blocks(model)
    if training.lora_rank is not None:
        add_lora(model, rank=training.lora_rank, seed=training.seed)
    model.to(device)
    return Trainer(
        model,
        training,
        objective=family_of(prepared.recipe.family).objective(model, training),
        data=corpus.data(training),
        run=prepared.run,
        texts=_texts(prepared.config, corpus),
        report=report,
        # Only what looks at whole outputs needs the whole model, which may have to be gathered for it.
        examine=(lambda: ranks.examined(model, lambda one: corpus.examine(one, training)))
        if isinstance(corpus, PairsCorpus)
        else dict,
        ranks=ranks,
    )


def _texts(config: ModelConfig, corpus: Corpus) -> dict[str, str]:
    further = {}
    if isinstance(corpus, PairsCorpus) and corpus.settings.source_vocab_size is not None:
        further[SOURCE_TOKENIZER] = corpus.train.tokenizers[0].backend.to_str()
    return further | {
        "config.json": json.dumps(config.model_dump(mode="json", exclude_none=True), indent=2),
        **tokenizer_files(corpus.tokenizer),
    }


def _copy(start: Model, model: Model) -> None:
    for field in type(model.config).model_fields:
        mine, theirs = getattr(model.config, field), getattr(start.config, field)
        if mine != theirs and field not in ("dropout", "init_std"):
            raise ConfigError(f"the model to start from has {field}={theirs}, the recipe says {mine}")
    model.load_state_dict(start.state_dict())


def write_recipe(run: RunFolder, recipe: Recipe) -> None:
    write_whole(run.path / RECIPE, recipe.as_toml().encode())
