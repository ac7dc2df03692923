"""Train GPT models to predict the next token on windows of a token store."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkv.choices import SpecialTokenStyle
from qkv.config import Recipe, TrainingConfig
from qkv.data import TokenSource
from qkv.data.token_batches import EvalTokenBatches, TokenBatch, TokenBatches
from qkv.engines import find_fused_loss
from qkv.models import GPT, Model
from qkv.nn.embedding import check_ids_shape_dtype_range
from qkv.text import Tokenizer
from qkv.training.data_preparation import open_token_splits, prepare_text_stores, prepare_token_store
from qkv.training.family import ProgressBars, TrainingData
from qkv.training.objectives import (
    DeviceInputs,
    LossOutput,
    Objective,
    SplitObjective,
    autocast_factory,
    chunked_loss_sum,
)


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
            write_store=prepare_token_store,
            progress=progress,
        )

    def open(self, recipe: Recipe, folder: Path) -> "TextCorpus":
        store, train, validation = open_token_splits(recipe, folder)
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
