"""Prepare text files, and train GPT models to predict the next token on windows of a token store."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkv.choices import SpecialTokenStyle
from qkv.config import Recipe, TrainingConfig
from qkv.data import TokenSource, TokenStore, is_unfinished, prepare_store, read_text_chunks
from qkv.data.documents import ProgressCallback, resolve_data_files
from qkv.data.token_batches import EvalTokenBatches, TokenBatch, TokenBatches
from qkv.data.token_store import INDEX_FILE
from qkv.engines import find_fused_loss
from qkv.errors import ConfigError, InputError
from qkv.models import GPT, Model
from qkv.nn.embedding import check_ids_shape_dtype_range
from qkv.text import Tokenizer, load_tokenizer, train_tokenizer
from qkv.training.family import ProgressBars, TrainingData
from qkv.training.objectives import (
    DeviceInputs,
    LossOutput,
    Objective,
    SplitObjective,
    autocast_factory,
    chunked_loss_sum,
)

TOKENIZER_CHARACTERS = 100_000_000
"""Maximum number of characters for training a tokenizer. More text slows down training but does not improve the
tokenizer."""


class GPTFamily:
    """The GPT model family.

    GPTs are trained on text files that are tokenized into a single stream of ids, with an end token after each
    document.
    """

    def prepare(self, recipe: Recipe, folder: Path, data_folder: Path, *, progress: ProgressBars) -> None:
        prepare_text_stores(
            recipe,
            folder,
            data_folder,
            specials=SpecialTokenStyle.GPT,
            write_store=_prepare_token_store,
            progress=progress,
        )

    def open(self, recipe: Recipe, folder: Path) -> "TextCorpus":
        store, train, validation = _open_token_splits(recipe, folder)
        return TextCorpus(tokenizer=store.tokenizer(), train=train, validation=validation)

    def objective(self, model: GPT, training: TrainingConfig) -> Objective:
        return next_token_objective(model, training)


@dataclass(frozen=True, kw_only=True)
class TextCorpus:
    """Token stores for next-token prediction."""

    tokenizer: Tokenizer
    train: TokenSource
    validation: TokenSource | None

    @property
    def summary(self) -> str:
        n_train, n_held_out = self.n_tokens
        return f"{n_train:,} training tokens, {n_held_out:,} held-out tokens"

    @property
    def n_tokens(self) -> tuple[int, int]:
        return self.train.n_tokens, 0 if self.validation is None else self.validation.n_tokens

    def data(self, training: TrainingConfig) -> TrainingData:
        batches = TokenBatches(
            source=self.train,
            seq_len=training.seq_len,
            batch_size=training.batch_size,
            seed=training.seed,
            cross_documents=training.cross_documents,
        )
        if self.validation is None:
            return TrainingData(batch=batches.batch)
        sweep = EvalTokenBatches(
            source=self.validation,
            seq_len=training.seq_len,
            batch_size=training.micro_batch_size,
            cross_documents=training.cross_documents,
        )
        n = len(sweep) if training.eval_batches is None else min(len(sweep), training.eval_batches)
        return TrainingData(batch=batches.batch, validation=lambda: (sweep.batch(t) for t in range(n)))

    def generation_metrics(self, model: Model, training: TrainingConfig) -> Mapping[str, Any]:  # noqa: ARG002
        return {}


def prepare_text_stores(
    recipe: Recipe,
    folder: Path,
    data_folder: Path,
    *,
    specials: SpecialTokenStyle,
    write_store: Callable[[list[Path], Path, Tokenizer, ProgressCallback], object],
    progress: ProgressBars,
) -> None:
    """Prepare the tokenizer and the training and validation stores.

    Results of an interrupted call are reused.
    """
    files = resolve_data_files(recipe.data.train, data_folder)
    if (folder / "train" / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(folder / "train")
    else:
        bar = progress("training the tokenizer")
        tokenizer = _load_or_train_tokenizer(recipe, files, data_folder, specials=specials, progress=bar)
    write_store(files, folder / "train", tokenizer, progress("reading the text"))
    if recipe.data.validation:
        files = resolve_data_files(recipe.data.validation, data_folder)
        write_store(files, folder / "validation", tokenizer, progress("reading validation"))


def _load_or_train_tokenizer(
    recipe: Recipe, files: list[Path], relative_to: Path, *, specials: SpecialTokenStyle, progress: ProgressCallback
) -> Tokenizer:
    """Load the tokenizer from the path in the recipe, relative to `relative_to`, or train a tokenizer on the files."""
    settings = recipe.tokenizer
    if settings.path is not None:
        tokenizer = load_tokenizer(relative_to / settings.path)
        n_ids = tokenizer.vocab_size
        if n_ids != settings.vocab_size:
            raise ConfigError(
                f"tokenizer.vocab_size must be {n_ids}, the size of {settings.path}, got {settings.vocab_size}"
            )
        return tokenizer
    texts = read_text_chunks(files, stop_after_characters=TOKENIZER_CHARACTERS, progress=progress)
    return train_tokenizer(
        settings.kind,
        texts,
        vocab_size=settings.vocab_size,
        style=specials,
        lowercase=settings.lowercase,
    )


def _prepare_token_store(files: list[Path], folder: Path, tokenizer: Tokenizer, progress: ProgressCallback) -> None:
    """Tokenize the files into a token store. Finished stores and shards are reused."""
    if is_unfinished(folder) or not (folder / INDEX_FILE).exists():
        prepare_store(files, folder, tokenizer=tokenizer, progress=progress)


def _open_token_splits(recipe: Recipe, stores: Path) -> tuple[TokenStore, TokenSource, TokenSource | None]:
    """Open the training store and return it along with the training and validation splits.

    Depending on the recipe, the validation split uses its own store, the end of the training store, or nothing.
    """
    store = TokenStore.open(stores / "train")
    if recipe.data.validation:
        return store, store, TokenStore.open(stores / "validation")
    if recipe.data.validation_fraction is None:
        return store, store, None
    boundary = round(store.n_tokens * (1 - recipe.data.validation_fraction))
    if not 0 < boundary < store.n_tokens:
        raise InputError(
            f"{', '.join(recipe.data.train)}: {store.n_tokens} tokens are not enough to hold out "
            f"{recipe.data.validation_fraction:.0%} for validation"
        )
    return store, store.slice(0, boundary), store.slice(boundary, store.n_tokens)


def next_token_objective(model: GPT, config: TrainingConfig) -> Objective:
    """Return the objective for predicting the next token at every position."""
    device, vocab_size = model.embedding.token.weight.device, model.config.vocab_size
    autocast = autocast_factory(config.precision, device)

    # The fused loss is faster only in compiled code.
    fused_loss = find_fused_loss(model.unembedding) if config.compile else None

    def loss_sum(ids: Tensor, targets: Tensor, documents: Tensor | None) -> Tensor:
        states = model.hidden_states(ids, documents=documents)
        if fused_loss is not None:
            return fused_loss(states, targets, chunk=config.loss_chunk_size)
        return chunked_loss_sum(model.unembedding, states, targets, chunk=config.loss_chunk_size)

    compute = torch.compile(loss_sum, dynamic=False) if config.compile else loss_sum

    def to_device(batch: TokenBatch) -> DeviceInputs:
        # Check on the CPU: an invalid id on a GPU triggers a device-side assert that kills the process.
        check_ids_shape_dtype_range(batch.ids, vocab_size)
        check_ids_shape_dtype_range(batch.targets.clamp(min=0), vocab_size)
        on_device = batch.to(device)
        return on_device.ids, on_device.targets, on_device.document_ids

    def compute_loss(ids: Tensor, targets: Tensor, documents: Tensor | None) -> LossOutput:
        with autocast():
            return LossOutput(compute(ids, targets, documents))

    return SplitObjective(to_device, compute_loss)
