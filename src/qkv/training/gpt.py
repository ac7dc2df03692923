"""How a GPT is trained: windows of a token store in, the next token of every position out."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkv.choices import SpecialStyle
from qkv.config import Recipe, TrainingConfig
from qkv.data import TokenSource
from qkv.data.windows import Batch, Batches, Sweep
from qkv.models import GPT, Model
from qkv.nn import check_ids
from qkv.text import Tokenizer
from qkv.training.family import Bars, TrainingData
from qkv.training.losses import unembedded_loss_sum
from qkv.training.objectives import Halves, Objective, Outcome, Sent, autocasting
from qkv.training.texts import make_store, open_parts, prepare_texts


class GPTFamily:
    """Text files become one stream of ids, documents parted by their end token."""

    def prepare(self, recipe: Recipe, folder: Path, data_folder: Path, *, progress: Bars) -> None:
        prepare_texts(recipe, folder, data_folder, specials=SpecialStyle.GPT, make=make_store, progress=progress)

    def open(self, recipe: Recipe, folder: Path) -> "TextCorpus":
        store, train, validation = open_parts(recipe, folder)
        return TextCorpus(tokenizer=store.tokenizer(), train=train, validation=validation)

    def objective(self, model: GPT, training: TrainingConfig) -> Objective:
        return next_token(model, training)


@dataclass(frozen=True, kw_only=True)
class TextCorpus:
    tokenizer: Tokenizer
    train: TokenSource
    validation: TokenSource | None

    @property
    def summary(self) -> str:
        n_train, n_held_out = self.n_tokens
        return f"{n_train:,} tokens to train on, {n_held_out:,} held out"

    @property
    def n_tokens(self) -> tuple[int, int]:
        return self.train.n_tokens, 0 if self.validation is None else self.validation.n_tokens

    def data(self, training: TrainingConfig) -> TrainingData:
        batches = Batches(
            source=self.train,
            context_length=training.seq_len,
            batch_size=training.batch_size,
            seed=training.seed,
            across_documents=training.cross_documents,
        )
        if self.validation is None:
            return TrainingData(batch=batches.batch)
        sweep = Sweep(
            source=self.validation,
            context_length=training.seq_len,
            batch_size=training.micro_batch_size,
            across_documents=training.cross_documents,
        )
        n = len(sweep) if training.eval_batches is None else min(len(sweep), training.eval_batches)
        return TrainingData(batch=batches.batch, validation=lambda: (sweep.batch(t) for t in range(n)))

    def examine(self, model: Model, training: TrainingConfig) -> Mapping[str, Any]:  # noqa: ARG002
        return {}


def next_token(model: GPT, config: TrainingConfig) -> Objective:
    """At every position a distribution over what comes next; the sum of −log p of what came."""
    device, vocab_size = model.embedding.token.weight.device, model.config.vocab_size
    autocast = autocasting(config.precision, device)

    def loss(ids: Tensor, targets: Tensor, documents: Tensor | None) -> Tensor:
        states = model.states(ids, documents=documents)
        return unembedded_loss_sum(model.unembedding, states, targets, chunk=config.loss_chunk)

    compute = torch.compile(loss, dynamic=False) if config.compile else loss

    def send(batch: Batch) -> Sent:
        # Here, where the ids are still on the CPU: a GPU would end the whole process.
        check_ids(batch.ids, vocab_size)
        check_ids(batch.targets.clamp(min=0), vocab_size)
        there = batch.to(device)
        return there.ids, there.targets, there.documents

    def judge(ids: Tensor, targets: Tensor, documents: Tensor | None) -> Outcome:
        with autocast():
            return Outcome(compute(ids, targets, documents))

    return Halves(send, judge)
