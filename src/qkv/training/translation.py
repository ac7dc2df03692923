"""How a translator is trained: a source and the true target so far in, the next token of the target out."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qkv.choices import Role
from qkv.config import PairsConfig, Recipe, Seq2SeqConfig, TrainingConfig
from qkv.data.pair_batches import PairBatch, PairBatches
from qkv.data.pair_store import PAIRS_FILE, PairStore, encode_pairs
from qkv.errors import ConfigError
from qkv.generation.translate import translate
from qkv.models import Model, RNNSeq2Seq, Seq2Seq
from qkv.nn import Block, check_ids
from qkv.text import Tokenizer
from qkv.text.closeness import closeness
from qkv.training.family import Bars, TrainingData
from qkv.training.losses import NO_TARGET, cross_entropy_sum, unembedded_loss_sum
from qkv.training.objectives import Measure, Objective, Outcome, autocasting
from qkv.training.pairs import clean_pairs, pair_tokenizers, pairs_of

N_SAMPLES = 3
"""Translations that an evaluation shows whole."""
_AT_ONCE = 100  # sentences translated together


class TranslationFamily:
    """Pairs are cleaned, given one vocabulary or two, and kept as two stores side by side."""

    def prepare(self, recipe: Recipe, folder: Path, data_folder: Path, *, progress: Bars) -> None:
        settings = pairs_of(recipe)
        if settings.examined and (recipe.data.validation or recipe.data.validation_share):
            closeness(["now"], ["now"], n_draws=0)  # a missing sacrebleu is better said now than at an evaluation
        if not (folder / "train" / PAIRS_FILE).exists():
            clean_pairs(recipe, folder, data_folder, progress("cleaning the pairs"))
        tokenizers = pair_tokenizers(recipe, folder / "train", data_folder, progress("training the tokenizer"))
        for part in ("train", "validation"):
            if (folder / part / PAIRS_FILE).exists():
                encode_pairs(folder / part, tokenizers, progress=progress)

    def open(self, recipe: Recipe, folder: Path) -> "PairsCorpus":
        has_validation = (folder / "validation" / PAIRS_FILE).exists()
        return PairsCorpus(
            settings=pairs_of(recipe),
            training=recipe.training,
            train=PairStore.open(folder / "train"),
            validation=PairStore.open(folder / "validation") if has_validation else None,
        )

    def objective(self, model: Seq2Seq | RNNSeq2Seq, training: TrainingConfig) -> Objective:
        return next_target(model, training)


@dataclass(frozen=True, kw_only=True)
class PairsCorpus:
    settings: PairsConfig
    training: TrainingConfig
    train: PairStore
    validation: PairStore | None

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's, which is also the source's unless that has one of its own."""
        return self.train.tokenizers[1]

    @property
    def summary(self) -> str:
        dropped = dict(self.train.record.dropped) | {"too long": self._batches(self.training).n_too_long}
        said = ", ".join(f"{n:,} {reason}" for reason, n in dropped.items() if n)
        held_out = 0 if self.validation is None else len(self.validation)
        return f"{len(self.train):,} pairs to train on{f' (left out: {said})' if said else ''}, {held_out:,} held out"

    @property
    def n_tokens(self) -> tuple[int, int]:
        """Of the targets, which are what is learnt."""
        return self.train.target.n_tokens, 0 if self.validation is None else self.validation.target.n_tokens

    def data(self, training: TrainingConfig) -> TrainingData:
        batches = self._batches(training)
        if self.validation is None:
            return TrainingData(batch=batches.batch)
        held_out = PairBatches(
            store=self.validation,
            times=self.validation.times({}),
            length=training.seq_len,
            batch_size=training.micro_batch_size,
            seed=0,
        )
        n = min(held_out.n_batches, training.eval_batches or held_out.n_batches)
        return TrainingData(batch=batches.batch, validation=lambda: (held_out.sweep(t) for t in range(n)))

    def examine(self, model: Model, training: TrainingConfig) -> Mapping[str, Any]:
        """BLEU and chrF of greedy translations of some held-out pairs, and the first few of them."""
        assert isinstance(model, Seq2Seq | RNNSeq2Seq)
        store = self.validation
        if store is None or not self.settings.examined:
            return {}
        fitting = np.flatnonzero(store.lengths[0] + 2 <= training.seq_len)
        # Evenly from the whole file, which may be in some order.
        numbers = fitting[
            np.linspace(0, len(fitting) - 1, min(len(fitting), self.settings.examined)).astype(int)
        ].tolist()
        sources, references = ([store.text(side, number) for number in numbers] for side in (0, 1))
        with uncompiled():
            written = self._translated(model, sources)
        scores = closeness(written, references, n_draws=0)
        shown = zip(sources, written, references, strict=True)
        return {
            "bleu": scores["BLEU"].score,
            "chrf": scores["chrF"].score,
            "samples": [
                *(f"{one} → {other} ({wanted})" for one, other, wanted in islice(shown, N_SAMPLES)),
                f"BLEU {scores['BLEU'].signature}",
            ],
        }

    def _translated(self, model: Seq2Seq | RNNSeq2Seq, sources: list[str]) -> list[str]:
        of_source, of_target = self.train.tokenizers
        encoded = of_source.encode_batch(sources)
        # Sentences of like length together: none waits long for another's end.
        order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))
        written = [""] * len(encoded)
        for start in range(0, len(order), _AT_ONCE):
            some = order[start : start + _AT_ONCE]
            best = translate(
                model,
                [encoded[i] for i in some],
                first=of_target.id_of(Role.BEGIN),
                max_new=[2 * len(encoded[i]) + 10 for i in some],
                stop_ids=frozenset({of_target.id_of(Role.END)}),
            )
            for i, (hypothesis, *_) in zip(some, best, strict=True):
                written[i] = of_target.decode(hypothesis.ids)
        return written

    def _batches(self, training: TrainingConfig) -> PairBatches:
        return PairBatches(
            store=self.train,
            times=self.train.times(self.settings.repeat),
            length=training.seq_len,
            batch_size=training.batch_size,
            seed=training.seed,
            join=self.settings.join,
        )


def next_target(model: Seq2Seq | RNNSeq2Seq, config: TrainingConfig) -> Objective:
    """At every target position a distribution over what comes next, from the source and the true tokens before it.

    Labels are smoothed in training alone: what is validated is −log p itself.
    """
    if isinstance(model, RNNSeq2Seq) and (config.compile or config.loss_chunk is not None):
        raise ConfigError("an rnn's recurrence is one call into a library: compiled and loss_chunk are for seq2seq")
    device, settings = next(model.parameters()).device, model.config
    is_of_pictures = isinstance(settings, Seq2SeqConfig) and settings.d_patch is not None
    autocast = autocasting(config.precision, device)
    judged = _compiled(model) if config.compile else _judged

    def score(there: PairBatch, smoothing: float) -> tuple[Tensor, ...]:
        if isinstance(model, RNNSeq2Seq):
            logits = model(there.source, there.ids, source_attention_mask=there.source_attention_mask)
            return judged(logits, there.targets, smoothing)
        states = model.states(there.ids, model.encode(there.source, attention_mask=there.source_attention_mask))
        if config.loss_chunk is None:
            return judged(model.unembedding(states), there.targets, smoothing)
        chunk = config.loss_chunk
        return (unembedded_loss_sum(model.unembedding, states, there.targets, chunk=chunk, smoothing=smoothing),)

    def objective(batch: PairBatch) -> Outcome:
        # Here, where the ids are still on the CPU: a GPU would end the whole process.
        if not is_of_pictures:
            check_ids(batch.source, settings.source_vocab_size)
        check_ids(batch.ids, settings.vocab_size)
        check_ids(batch.targets.clamp(min=0), settings.vocab_size)
        is_training = torch.is_grad_enabled()
        with autocast(), nullcontext() if is_training else uncompiled():
            loss, *rest = score(batch.to(device), config.label_smoothing if is_training else 0.0)
        if not rest:
            return Outcome(loss)
        plain, is_right, n = rest
        measures = {"accuracy": Measure(is_right.float(), n)}
        if is_training and config.label_smoothing:
            measures["plain_loss"] = Measure(plain, n)
        return Outcome(loss, measures)

    return objective


def _compiled(model: Seq2Seq | RNNSeq2Seq) -> Callable[[Tensor, Tensor, float], tuple[Tensor, ...]]:
    """The model's blocks in place, and `_judged`.

    Block by block, with rows and lengths left open: all blocks of a kind share one piece of code, so it is made in
    seconds, once for all the shapes that batches have. The whole model at once takes minutes.
    """
    for block in model.modules():
        if isinstance(block, Block):
            block.compile(dynamic=True)
    return torch.compile(_judged, dynamic=True)


def _judged(logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, ...]:
    """Loss, loss without smoothing, right tokens, all tokens."""
    is_right = (logits.detach().argmax(-1) == targets).sum()
    plain = cross_entropy_sum(logits.detach(), targets)
    return cross_entropy_sum(logits, targets, smoothing=smoothing), plain, is_right, (targets != NO_TARGET).sum()


def uncompiled() -> AbstractContextManager[object]:
    """Inside the `with`, what was compiled for training runs as it is written: other shapes, a cache, no gradients."""
    return torch.compiler.set_stance("force_eager")
