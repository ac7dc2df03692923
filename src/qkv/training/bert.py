"""How a BERT is pre-trained: which words were hidden, and does the second text follow the first?"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from qkv.choices import Precision, SpecialStyle
from qkv.config import MaskingConfig, Recipe, TrainingConfig
from qkv.data.masked_batches import MaskedBatch, MaskedBatches
from qkv.data.sentence_store import SentenceStore, prepare_sentences
from qkv.data.sources import Progress
from qkv.errors import ConfigError
from qkv.models import BERT, Model
from qkv.nn import check_ids
from qkv.text import Tokenizer
from qkv.training.evaluation import Score, evaluate
from qkv.training.family import Bars, TrainingData
from qkv.training.losses import NO_TARGET, cross_entropy_sum
from qkv.training.objectives import Halves, Measure, Objective, Outcome, Sent, TrainingBatch, autocasting
from qkv.training.texts import prepare_texts

VALIDATION_SEED = 0
"""Not the run's: two runs are measured by the same pairs and the same hidden words."""


_ROWS = 32  # judged at once: on a CPU more are not faster
_Answers = tuple[Tensor, Tensor, Tensor]
"""Summed −log p, how many are right, how many there are."""


class BERTFamily:
    """Text files become documents of sentences; pairs and hidden words are drawn from them anew each epoch."""

    def prepare(self, recipe: Recipe, folder: Path, data_folder: Path, *, progress: Bars) -> None:
        prepare_texts(recipe, folder, data_folder, specials=SpecialStyle.BERT, make=_make, progress=progress)

    def open(self, recipe: Recipe, folder: Path) -> "SentenceCorpus":
        assert recipe.examples is not None
        train, validation = SentenceStore.open(folder / "train"), None
        tokenizer = train.store.tokenizer()
        if recipe.data.validation:
            validation = SentenceStore.open(folder / "validation")
        elif recipe.data.validation_share is not None:
            train, validation = train.split(recipe.data.validation_share)
        corpus = SentenceCorpus(tokenizer=tokenizer, examples=recipe.examples, train=train, validation=validation)
        corpus.data(recipe.training)  # texts that give no pairs are refused now, not after the model is built
        return corpus

    def objective(self, model: BERT, training: TrainingConfig) -> Objective:
        return masked_words(model, training)


@dataclass(frozen=True, kw_only=True)
class SentenceCorpus:
    tokenizer: Tokenizer
    examples: MaskingConfig
    train: SentenceStore
    validation: SentenceStore | None

    @property
    def summary(self) -> str:
        n_train, n_held_out = self.n_tokens
        return f"{n_train:,} tokens of {len(self.train.documents):,} documents to train on, {n_held_out:,} held out"

    @property
    def n_tokens(self) -> tuple[int, int]:
        return self.train.n_words, 0 if self.validation is None else self.validation.n_words

    def data(self, training: TrainingConfig) -> TrainingData:
        batches = self._batches(self.train, training, rows=training.batch_size, seed=training.seed)
        if self.validation is None:
            return TrainingData(batch=batches.batch)
        held_out = self._batches(self.validation, training, rows=training.micro_batch_size, seed=VALIDATION_SEED)
        # Whole batches alone, so that a compiled model sees one shape.
        n = max(1, held_out.choose.n_examples // training.micro_batch_size)
        n = n if training.eval_batches is None else min(n, training.eval_batches)
        return TrainingData(batch=batches.batch, validation=lambda: (held_out.batch(t) for t in range(n)))

    def _batches(self, source: SentenceStore, training: TrainingConfig, *, rows: int, seed: int) -> MaskedBatches:
        return MaskedBatches(
            source=source,
            tokenizer=self.tokenizer,
            config=self.examples,
            length=training.seq_len,
            batch_size=rows,
            seed=seed,
        )

    def examine(self, model: Model, training: TrainingConfig) -> Mapping[str, Any]:  # noqa: ARG002
        return {}


def masked_words(model: BERT, config: TrainingConfig) -> Objective:
    """−Σ log p of the hidden words, plus that of each pair's answer, weighted as if there were as many of these.

    So the loss, a target, is the sum of both losses' means, as published. Words are predicted where they are hidden
    alone: about a seventh of the head's work.
    """
    if config.loss_chunk is not None:
        raise ConfigError("loss_chunk: a bert predicts the hidden words alone; a smaller micro_batch_size saves memory")
    device, vocab_size = model.embedding.token.weight.device, model.config.vocab_size
    autocast = autocasting(config.precision, device)

    def answers(
        ids: Tensor, segments: Tensor, attention_mask: Tensor, places: Tensor, targets: Tensor, is_wrong: Tensor | None
    ) -> dict[str, _Answers]:
        states = model(ids, segments=segments, attention_mask=attention_mask)
        hidden = states.gather(1, places[..., None].expand(-1, -1, states.shape[-1]))
        found = {"masked_word": _compared(model.masked_word_logits(hidden), targets)}
        if is_wrong is not None:
            found["next_sentence"] = _compared(model.next_sentence_logits(states), is_wrong)
        return found

    compute = torch.compile(answers, dynamic=False) if config.compile else answers

    def send(batch: MaskedBatch) -> Sent:
        # Here, where the ids are still on the CPU: a GPU would end the whole process.
        check_ids(batch.ids, vocab_size)
        check_ids(batch.targets.clamp(min=0), vocab_size)
        there = batch.to(device)
        targets_a_row = torch.full((), batch.targets_a_row, device=device)
        return targets_a_row, there.ids, there.segments, there.attention_mask, there.places, there.targets, there.is_wrong

    def judge(targets_a_row: Tensor, *given: Any) -> Outcome:  # noqa: ANN401 - one family's tensors
        with autocast():
            found = compute(*given)
        measures = {}
        for name, (loss, n_right, n) in found.items():
            measures[f"{name}_loss"], measures[f"{name}_accuracy"] = Measure(loss, n), Measure(n_right, n)
        loss = found["masked_word"][0]
        if "next_sentence" in found:
            loss = loss + targets_a_row * found["next_sentence"][0]
        return Outcome(loss, measures)

    return Halves(send, judge)


def held_out_score(model: BERT, tokenizer: Tokenizer, files: Sequence[str | Path], *, progress: Bars) -> Score:
    """Both games (or the words alone, without a next-sentence head) on texts that the model has not been trained on."""
    training = TrainingConfig(
        steps=1, batch_size=_ROWS, seq_len=model.config.context_length, warmup_steps=0, precision=Precision.FP32
    )
    examples = MaskingConfig(next_sentence=model.next_sentence is not None)
    with TemporaryDirectory() as folder:
        store = prepare_sentences(files, Path(folder) / "store", tokenizer=tokenizer, progress=progress("reading"))
        corpus = SentenceCorpus(tokenizer=tokenizer, examples=examples, train=store, validation=store)
        batches = corpus.data(training).validation
        assert batches is not None
        move, n = progress("guessing"), store.n_words
        return evaluate(model, masked_words(model, training), _watched(batches(), move, n))


def _watched(batches: Iterable[TrainingBatch], move: Progress, n_tokens: int) -> Iterator[TrainingBatch]:
    done = 0
    for batch in batches:
        yield batch
        done += batch.n_tokens
        move(min(done, n_tokens), n_tokens)


def _compared(logits: Tensor, targets: Tensor) -> _Answers:
    n_right = (logits.detach().argmax(-1) == targets).sum()
    return cross_entropy_sum(logits, targets), n_right.float(), (targets != NO_TARGET).sum()


def _make(files: list[Path], folder: Path, tokenizer: Tokenizer, progress: Progress) -> SentenceStore:
    return prepare_sentences(files, folder, tokenizer=tokenizer, progress=progress)
