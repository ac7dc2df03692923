"""Prepare the data, tokenizer, model and trainer for a recipe. Interrupted preparations can be resumed."""

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from qkv.choices import BackendName
from qkv.config import ModelConfig, Recipe, load_recipe
from qkv.config.base import Config
from qkv.data.documents import resolve_data_files
from qkv.data.file_io import convert_os_errors_to_disk_error, write_atomically
from qkv.errors import ConfigError, InputError, RunError
from qkv.models import Model, build
from qkv.nn import Blocks
from qkv.text import tokenizer_files
from qkv.training.bert import BERTFamily
from qkv.training.checkpoint import RunFolder, check_fingerprints, record_fingerprints
from qkv.training.distributed import SINGLE_PROCESS, Distributed
from qkv.training.family import Corpus, Family, ProgressBars
from qkv.training.gpt import GPTFamily
from qkv.training.loop import MetricsCallback, Trainer
from qkv.training.lora import freeze_and_add_attention_lora
from qkv.training.recipe_selection import fit_steps_to_time
from qkv.training.step import build_train_step
from qkv.training.translation import PairsCorpus, TranslationFamily
from qkv.weights.model_loader import SOURCE_TOKENIZER

FAMILIES: dict[str, Family] = {
    "gpt": GPTFamily(),
    "bert": BERTFamily(),
    "seq2seq": TranslationFamily(),
    "rnn": TranslationFamily(),
}


def get_family(name: str) -> Family:
    """Return the model family with the given name.

    Raises `ConfigError` if the family cannot be trained.
    """
    if name not in FAMILIES:
        raise ConfigError(f"family must be one of {', '.join(FAMILIES)} for training, got {name!r}")
    return FAMILIES[name]


RECIPE_FILE = "recipe.toml"
PREPARATION_FILE = "preparation.json"
DATA_FOLDER = "data"
MIN_BATCHES = 4
"""Minimum number of training batches. With fewer batches, the data repeats every few steps, and the model would
memorize it."""
MIN_HELD_OUT_TOKENS = 500
"""Minimum number of held-out tokens. The loss varies by about 2 nats between tokens, so the standard error of the mean
loss is about 0.1 or more with fewer tokens."""


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run folder with a finished tokenizer and finished token stores."""

    run: RunFolder
    recipe: Recipe
    corpus: Corpus

    @property
    def config(self) -> ModelConfig:
        """Model config with the tokenizer's vocabulary size."""
        return self.recipe.build_model_config(self.corpus.tokenizer.vocab_size)

    @property
    def data_warning(self) -> str:
        """A warning about insufficient training or held-out data, or an empty string."""
        n_train, n_held_out = self.corpus.n_tokens
        batch_tokens = self.recipe.training.batch_size * self.recipe.training.seq_len
        warnings = []
        if n_train < MIN_BATCHES * batch_tokens:
            size = f"{n_train:,} training tokens are fewer than {MIN_BATCHES} batches of {batch_tokens:,} tokens"
            warnings.append(f"{size}, so the model will memorize the training data")
        if 0 < n_held_out < MIN_HELD_OUT_TOKENS:
            warnings.append(
                f"{n_held_out:,} held-out tokens are fewer than {MIN_HELD_OUT_TOKENS}, so the validation loss will be "
                "noisy"
            )
        return "; ".join(warnings)


class PreparationInputs(Config):
    """The inputs of the preparation besides the recipe.

    The inputs are saved so that an interrupted preparation can be resumed.
    """

    data: str
    """Folder to which the recipe's data files are relative."""
    seconds: float | None = None
    """Time budget in seconds if the number of steps has not yet been fitted to it, or None otherwise."""


def prepare_run(
    recipe: Recipe, folder: Path, data_folder: Path, *, progress: ProgressBars, seconds: float | None = None
) -> PreparedRun:
    """Create a run folder, train or load the tokenizer and tokenize the data.

    `seconds` is the time budget for `fit_run_to_time`, which is saved in case the preparation is interrupted. Call
    `write_fingerprints_and_final_recipe` afterwards. The folder is deleted if the input is invalid.
    """
    resolve_data_files((*recipe.data.train, *recipe.data.validation), data_folder)
    run = RunFolder.create(folder)
    state = PreparationInputs(data=str(data_folder.resolve()), seconds=seconds)
    write_atomically(run.path / PREPARATION_FILE, state.model_dump_json().encode())
    write_recipe(run, recipe)
    try:
        with run.locked():
            return resume_preparation(run.path, progress=progress)
    except (ConfigError, InputError):
        run.discard()
        raise


def load_preparation_inputs(folder: Path) -> PreparationInputs | None:
    """Return the inputs of an unfinished preparation, or None if the preparation is finished."""
    path = folder / PREPARATION_FILE
    try:
        return PreparationInputs(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None
    except (OSError, ValueError, TypeError, ConfigError) as error:
        raise RunError(f"{path}: invalid preparation state: {error}") from None


def resume_preparation(folder: Path, *, progress: ProgressBars) -> PreparedRun:
    """Continue an interrupted preparation. A finished tokenizer and finished shards are reused."""
    state, recipe = load_preparation_inputs(folder), _load_run_recipe(folder)
    assert state is not None
    get_family(recipe.family).prepare(recipe, folder / DATA_FOLDER, Path(state.data), progress=progress)
    return _open_corpus(folder, recipe)


def fit_run_to_time(
    prepared: PreparedRun,
    *,
    device: torch.device,
    seconds: float,
    distributed: Distributed = SINGLE_PROCESS,
    backend: str = BackendName.AUTO,
) -> PreparedRun:
    """Set the number of steps of a run so that it takes about `seconds`.

    The time per step is measured on a temporary model.
    """
    trainer = build_trainer(
        prepared, device=device, report=lambda _entry: None, distributed=distributed, backend=backend
    )
    recipe = fit_steps_to_time(
        prepared.recipe, seconds=seconds, seconds_per_step=trainer.train_and_measure_step_seconds()
    )
    return replace(prepared, recipe=recipe)


def write_fingerprints_and_final_recipe(prepared: PreparedRun) -> None:
    """Record the data fingerprints and the final recipe. The run can then be resumed without the original data."""
    record_fingerprints(prepared.run.path, prepared.run.path / DATA_FOLDER)
    write_recipe(prepared.run, prepared.recipe)
    with convert_os_errors_to_disk_error(prepared.run.path, 0):
        (prepared.run.path / PREPARATION_FILE).unlink(missing_ok=True)


def open_run(folder: Path) -> PreparedRun:
    """Open a prepared run.

    Raises `RunError` if the preparation is unfinished or the data has changed.
    """
    recipe = _load_run_recipe(folder)
    if load_preparation_inputs(folder) is not None:
        raise RunError(f"{folder}: the data preparation was interrupted; resume it with: qkv train --resume {folder}")
    check_fingerprints(folder)
    return _open_corpus(folder, recipe)


def open_shared_run(folder: Path) -> PreparedRun:
    """Open a run that another process has prepared with `prepare_run`, without checking the data."""
    return _open_corpus(folder, _load_run_recipe(folder))


def _open_corpus(folder: Path, recipe: Recipe) -> PreparedRun:
    corpus = get_family(recipe.family).open(recipe, folder / DATA_FOLDER)
    return PreparedRun(run=RunFolder(folder), recipe=recipe, corpus=corpus)


def _load_run_recipe(folder: Path) -> Recipe:
    if not (folder / RECIPE_FILE).is_file():
        raise RunError(f"{folder}: must be a run folder, but contains no {RECIPE_FILE}")
    return load_recipe(folder / RECIPE_FILE)


def build_trainer(
    prepared: PreparedRun,
    *,
    device: torch.device,
    report: MetricsCallback,
    start: Model | None = None,
    distributed: Distributed = SINGLE_PROCESS,
    backend: str = BackendName.AUTO,
) -> Trainer:
    """Build the model and its trainer.

    If `start` is given, training starts from the weights of `start`, and its config must match.
    """
    training, corpus = distributed.shrink_micro_batch_to_fill_ranks(prepared.recipe.training), prepared.corpus
    model = build(prepared.config, seed=training.seed)
    if start is not None:
        _check_config_and_copy_weights(start, model)
    if training.activation_checkpointing:
        for module in model.modules():
            if isinstance(module, Blocks):
                module.activation_checkpointing = True
    if training.lora_rank is not None:
        freeze_and_add_attention_lora(model, rank=training.lora_rank, seed=training.seed)
    model.to(device)
    create_objective = partial(get_family(prepared.recipe.family).objective, model, training)
    return Trainer(
        build_train_step(model, training, create_objective, distributed=distributed, backend=backend),
        data=corpus.data(training),
        run=prepared.run,
        texts=_checkpoint_texts(prepared.config, corpus),
        report=report,
        # Only translation has generation metrics. Skipping them for the other families avoids gathering a sharded
        # model.
        generation_metrics=(
            lambda: distributed.gather_and_evaluate_on_rank0(
                model, lambda full_model: corpus.generation_metrics(full_model, training)
            )
        )
        if isinstance(corpus, PairsCorpus)
        else dict,
    )


def _checkpoint_texts(config: ModelConfig, corpus: Corpus) -> dict[str, str]:
    texts = {}
    if isinstance(corpus, PairsCorpus) and corpus.settings.source_vocab_size is not None:
        texts[SOURCE_TOKENIZER] = corpus.train.tokenizers[0].backend.to_str()
    return texts | {
        "config.json": json.dumps(config.model_dump(mode="json", exclude_none=True), indent=2),
        **tokenizer_files(corpus.tokenizer),
    }


def _check_config_and_copy_weights(start: Model, model: Model) -> None:
    for field in type(model.config).model_fields:
        expected, actual = getattr(model.config, field), getattr(start.config, field)
        if expected != actual and field not in ("dropout", "init_std"):
            raise ConfigError(f"{field} of the initial model must be {expected}, as in the recipe, got {actual}")
    model.load_state_dict(start.state_dict())


def write_recipe(run: RunFolder, recipe: Recipe) -> None:
    """Write the recipe to the run folder."""
    write_atomically(run.path / RECIPE_FILE, recipe.to_toml().encode())
