"""From a recipe to a trainer: tokenizer, token stores, model."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from qkv.config import GPTConfig, Recipe, load_recipe
from qkv.config.base import Config
from qkv.data import TokenSource, TokenStore, find_sources, is_unfinished, prepare_store, read_texts
from qkv.data.disk import write_whole, writing
from qkv.data.store import INDEX_FILE
from qkv.data.windows import Batches, Sweep
from qkv.errors import ConfigError, InputError, RunError
from qkv.models import GPT
from qkv.text import Tokenizer, load_tokenizer, train_tokenizer
from qkv.training.lora import add_lora
from qkv.training.objectives import next_token
from qkv.training.recompute import recompute_blocks
from qkv.training.run import RunFolder
from qkv.training.trainer import Report, Trainer, TrainingData

Progress = Callable[[int, int], None]
Bars = Callable[[str], Progress]
RECIPE = "recipe.toml"
PREPARING = "preparing.json"
TOKENIZER_CHARACTERS = 100_000_000
"""More text than this makes a tokenizer slower, not better."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run folder whose tokenizer and stores are there."""

    run: RunFolder
    recipe: Recipe
    tokenizer: Tokenizer
    train: TokenSource
    validation: TokenSource | None


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

    `seconds` is noted for whoever fits the steps; `finish_preparing` ends it. Bad input leaves an empty folder.
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
        for left_over in run.path.iterdir():
            shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink()
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
    data_folder, stores = Path(state.data), folder / "data"
    train_files = resolve(recipe.data.train, data_folder)
    if (stores / "train" / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(stores / "train")
    else:
        tokenizer = _tokenizer(recipe, train_files, data_folder, progress("training the tokenizer"))
    _store(train_files, stores / "train", tokenizer, progress("reading the text"))
    if recipe.data.validation:
        files = resolve(recipe.data.validation, data_folder)
        _store(files, stores / "validation", tokenizer, progress("reading validation"))
    return _open(folder, recipe)


def finish_preparing(prepared: Prepared) -> None:
    """From now on the run is what its recipe says, and can be resumed without the texts."""
    write_recipe(prepared.run, prepared.recipe)
    with writing(prepared.run.path, 0):
        (prepared.run.path / PREPARING).unlink(missing_ok=True)


def open_run(folder: Path) -> Prepared:
    """A run that was prepared before."""
    recipe = _read_recipe(folder)
    if preparing(folder) is not None:
        raise RunError(f"{folder}: was stopped while it was prepared; go on: qkv train --resume {folder}")
    return _open(folder, recipe)


def _open(folder: Path, recipe: Recipe) -> Prepared:
    store = TokenStore.open(folder / "data" / "train")
    train: TokenSource = store
    validation: TokenSource | None = None
    if recipe.data.validation:
        validation = TokenStore.open(folder / "data" / "validation")
    elif recipe.data.validation_share is not None:
        cut = round(store.n_tokens * (1 - recipe.data.validation_share))
        if not 0 < cut < store.n_tokens:
            raise InputError(
                f"{store.n_tokens} tokens are too few to keep {recipe.data.validation_share:.0%} of them apart"
            )
        train, validation = store.part(0, cut), store.part(cut, store.n_tokens)
    return Prepared(
        run=RunFolder(folder), recipe=recipe, tokenizer=store.tokenizer(), train=train, validation=validation
    )


def _read_recipe(folder: Path) -> Recipe:
    if not (folder / RECIPE).is_file():
        raise RunError(f"{folder}: holds no {RECIPE}, so it is no run to go on with")
    return load_recipe(folder / RECIPE)


def _store(files: list[Path], folder: Path, tokenizer: Tokenizer, progress: Progress) -> None:
    if is_unfinished(folder) or not (folder / INDEX_FILE).exists():
        prepare_store(files, folder, tokenizer=tokenizer, progress=progress)


def build_trainer(prepared: Prepared, *, device: torch.device, report: Report, start: GPT | None = None) -> Trainer:
    """`start`: a model to begin with; it must have the recipe's shape."""
    recipe, training = prepared.recipe, prepared.recipe.training
    config = recipe.model_config_for(prepared.tokenizer.vocabulary_size)
    if not isinstance(config, GPTConfig):
        raise ConfigError(f"family={recipe.family!r} cannot be trained yet")
    model = GPT(config, seed=training.seed)
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
        objective=next_token(model, training),
        data=training_data(prepared),
        run=prepared.run,
        texts=_texts(config, prepared.tokenizer),
        report=report,
    )


def training_data(prepared: Prepared) -> TrainingData:
    training = prepared.recipe.training
    batches = Batches(
        source=prepared.train,
        context_length=training.length,
        batch_size=training.batch_size,
        seed=training.seed,
        across_documents=training.cross_documents,
    )
    if prepared.validation is None:
        return TrainingData(batch=batches.batch)
    sweep = Sweep(
        source=prepared.validation,
        context_length=training.length,
        batch_size=training.micro_batch_size,
        across_documents=training.cross_documents,
    )
    n = len(sweep) if training.evaluate_batches is None else min(len(sweep), training.evaluate_batches)
    return TrainingData(batch=batches.batch, validation=lambda: (sweep.batch(t) for t in range(n)))


def resolve(patterns: tuple[str, ...], data_folder: Path) -> list[Path]:
    """Files that the patterns mean, relative to the data folder; a pattern that means none is an error."""
    found = []
    for pattern in patterns:
        path = data_folder / pattern
        matches = sorted(path.parent.glob(path.name)) if "*" in pattern else [path]
        if not matches:
            raise InputError(f"{path}: no file matches")
        found += matches
    find_sources(found)
    return found


def _tokenizer(recipe: Recipe, files: list[Path], data_folder: Path, move: Progress) -> Tokenizer:
    settings = recipe.tokenizer
    if settings.path is not None:
        tokenizer = load_tokenizer(data_folder / settings.path)
        n_ids = tokenizer.vocabulary_size
        if n_ids != settings.vocabulary_size:
            raise ConfigError(f"tokenizer.vocabulary_size={settings.vocabulary_size}, but {settings.path} has {n_ids}")
        return tokenizer

    texts = read_texts(files, max_characters=TOKENIZER_CHARACTERS, progress=move)
    return train_tokenizer(settings.kind, texts, vocabulary_size=settings.vocabulary_size)


def _texts(config: GPTConfig, tokenizer: Tokenizer) -> dict[str, str]:
    roles = {role.value: token for role, token in tokenizer.specials.items()}
    return {
        "config.json": json.dumps(config.model_dump(mode="json", exclude_none=True), indent=2),
        "tokenizer.json": tokenizer.backend.to_str(),
        "tokenizer_config.json": json.dumps({**roles, "tokenizer_class": "PreTrainedTokenizerFast"}),
    }


def _copy(start: GPT, model: GPT) -> None:
    for field in type(model.config).model_fields:
        mine, theirs = getattr(model.config, field), getattr(start.config, field)
        if mine != theirs and field not in ("dropout", "initial_std"):
            raise ConfigError(f"the model to start from has {field}={theirs}, the recipe says {mine}")
    model.load_state_dict(start.state_dict())


def write_recipe(run: RunFolder, recipe: Recipe) -> None:
    write_whole(run.path / RECIPE, recipe.as_toml().encode())
