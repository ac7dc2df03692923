"""Train translation models with teacher forcing."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qkv.choices import SpecialToken
from qkv.config import PairsConfig, Recipe, Seq2SeqConfig, TrainingConfig
from qkv.data.pair_batches import PairBatch, PairBatches
from qkv.data.pair_store import PAIRS_FILE, PairStore, tokenize_and_delete_pair_texts
from qkv.engines import decode_engine
from qkv.errors import ConfigError
from qkv.generation.translate import translate
from qkv.models import Model, RNNSeq2Seq, Seq2Seq
from qkv.nn import Block
from qkv.nn.embedding import check_ids_shape_dtype_range
from qkv.tensors import IGNORE_INDEX
from qkv.text import Tokenizer
from qkv.text.translation_metrics import score_translations
from qkv.training.data_preparation import (
    get_pairs_config,
    load_or_train_pair_tokenizers,
    write_clean_train_and_validation_pairs,
)
from qkv.training.family import ProgressBars, TrainingData
from qkv.training.objectives import LossOutput, Metric, Objective, autocast_factory, chunked_loss_sum, cross_entropy_sum

N_SAMPLES = 3
"""Number of sample translations that are logged in each evaluation."""
_TRANSLATION_BATCH_SIZE = 100


class TranslationFamily:
    """The translation model family.

    The models are trained on sentence pairs, with a joint vocabulary or one vocabulary per language.
    """

    def prepare(self, recipe: Recipe, folder: Path, data_folder: Path, *, progress: ProgressBars) -> None:
        settings = get_pairs_config(recipe)
        if settings.n_eval_translations and (recipe.data.validation or recipe.data.validation_fraction):
            score_translations(
                ["now"], ["now"], n_bootstrap_samples=0
            )  # raises an error now, rather than at the first evaluation, if sacrebleu is missing
        if not (folder / "train" / PAIRS_FILE).exists():
            write_clean_train_and_validation_pairs(recipe, folder, data_folder, progress("cleaning the pairs"))
        tokenizers = load_or_train_pair_tokenizers(
            recipe, folder / "train", data_folder, progress("training the tokenizer")
        )
        for part in ("train", "validation"):
            if (folder / part / PAIRS_FILE).exists():
                tokenize_and_delete_pair_texts(folder / part, tokenizers, progress=progress)

    def open(self, recipe: Recipe, folder: Path) -> "PairsCorpus":
        has_validation = (folder / "validation" / PAIRS_FILE).exists()
        return PairsCorpus(
            settings=get_pairs_config(recipe),
            training=recipe.training,
            train=PairStore.open(folder / "train"),
            validation=PairStore.open(folder / "validation") if has_validation else None,
        )

    def objective(self, model: Seq2Seq | RNNSeq2Seq, training: TrainingConfig) -> Objective:
        return translation_objective(model, training)


@dataclass(frozen=True, kw_only=True)
class PairsCorpus:
    """Sentence pairs for translation, stored as parallel token stores."""

    settings: PairsConfig
    training: TrainingConfig
    train: PairStore
    validation: PairStore | None

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer for the target language.

        If the vocabulary is joint, this tokenizer is also used for the source language.
        """
        return self.train.tokenizers[1]

    @property
    def summary(self) -> str:
        dropped = dict(self.train.record.dropped) | {"too long": self._train_batches(self.training).n_too_long}
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in dropped.items() if n)
        held_out = 0 if self.validation is None else len(self.validation)
        excluded = f" (excluded: {reasons})" if reasons else ""
        return f"{len(self.train):,} training pairs{excluded}, {held_out:,} held-out pairs"

    @property
    def n_tokens(self) -> tuple[int, int]:
        """Number of training and held-out target tokens."""
        return self.train.target.n_tokens, 0 if self.validation is None else self.validation.target.n_tokens

    def data(self, training: TrainingConfig) -> TrainingData:
        batches = self._train_batches(training)
        if self.validation is None:
            return TrainingData(batch=batches.batch)
        held_out = PairBatches(
            store=self.validation,
            repeats=self.validation.pair_repeats({}),
            seq_len=training.seq_len,
            batch_size=training.micro_batch_size,
            seed=0,
        )
        n = min(held_out.n_batches, training.eval_batches or held_out.n_batches)
        return TrainingData(batch=batches.batch, validation=lambda: (held_out.eval_batch(t) for t in range(n)))

    def generation_metrics(self, model: Model, training: TrainingConfig) -> Mapping[str, Any]:
        """Translate some held-out sentences greedily and return BLEU, chrF and a few samples."""
        assert isinstance(model, Seq2Seq | RNNSeq2Seq)
        store = self.validation
        if store is None or not self.settings.n_eval_translations:
            return {}
        fitting_rows = np.flatnonzero(store.lengths[0] + 2 <= training.seq_len)
        # Spread the samples evenly over the file because it may be sorted.
        rows = fitting_rows[
            np.linspace(0, len(fitting_rows) - 1, min(len(fitting_rows), self.settings.n_eval_translations)).astype(int)
        ].tolist()
        sources, references = ([store.text(side, row) for row in rows] for side in (0, 1))
        with force_eager():
            translations = self._translate_greedily(model, sources)
        scores = score_translations(translations, references, n_bootstrap_samples=0)
        examples = zip(sources, translations, references, strict=True)
        return {
            "bleu": scores["BLEU"].score,
            "chrf": scores["chrF"].score,
            "samples": [
                *(
                    f"{source} → {translation} ({reference})"
                    for source, translation, reference in islice(examples, N_SAMPLES)
                ),
                f"BLEU {scores['BLEU'].signature}",
            ],
        }

    def _translate_greedily(self, model: Seq2Seq | RNNSeq2Seq, sources: list[str]) -> list[str]:
        source_tokenizer, target_tokenizer = self.train.tokenizers
        encoded = source_tokenizer.encode_batch(sources)
        # Batch sentences of similar length so that short sentences do not wait for long ones.
        order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))
        translations = [""] * len(encoded)
        for start in range(0, len(order), _TRANSLATION_BATCH_SIZE):
            batch = order[start : start + _TRANSLATION_BATCH_SIZE]
            best = translate(
                model,
                [encoded[i] for i in batch],
                start_id=target_tokenizer.special_id(SpecialToken.BOS),
                max_new=[2 * len(encoded[i]) + 10 for i in batch],
                stop_ids=frozenset({target_tokenizer.special_id(SpecialToken.EOS)}),
                create_engine=decode_engine,
            )
            for i, (hypothesis, *_) in zip(batch, best, strict=True):
                translations[i] = target_tokenizer.decode(hypothesis.ids)
        return translations

    def _train_batches(self, training: TrainingConfig) -> PairBatches:
        return PairBatches(
            store=self.train,
            repeats=self.train.pair_repeats(self.settings.repeat),
            seq_len=training.seq_len,
            batch_size=training.batch_size,
            seed=training.seed,
            join_fraction=self.settings.join_fraction,
        )


def translation_objective(model: Seq2Seq | RNNSeq2Seq, config: TrainingConfig) -> Objective:
    """Return the objective for predicting the next target token from the source and the preceding target tokens.

    Label smoothing applies only to training. The validation loss is the plain negative log-likelihood.
    """
    if isinstance(model, RNNSeq2Seq) and (config.compile or config.loss_chunk_size is not None):
        raise ConfigError("compile and loss_chunk_size are not supported for family='rnn'")
    device, settings = next(model.parameters()).device, model.config
    has_image_source = isinstance(settings, Seq2SeqConfig) and settings.d_patch is not None
    autocast = autocast_factory(config.precision, device)
    loss_function = _loss_sums_and_token_counts
    if config.compile:
        _compile_blocks(model)
        loss_function = torch.compile(_loss_sums_and_token_counts, dynamic=True)

    def compute_sums(on_device: PairBatch, smoothing: float) -> tuple[Tensor, ...]:
        if isinstance(model, RNNSeq2Seq):
            logits = model(on_device.source, on_device.ids, source_attention_mask=on_device.source_attention_mask)
            return loss_function(logits, on_device.targets, smoothing)
        states = model.hidden_states(
            on_device.ids, model.encode(on_device.source, attention_mask=on_device.source_attention_mask)
        )
        if config.loss_chunk_size is None:
            return loss_function(model.unembedding(states), on_device.targets, smoothing)
        chunk = config.loss_chunk_size
        return (chunked_loss_sum(model.unembedding, states, on_device.targets, chunk=chunk, smoothing=smoothing),)

    def objective(batch: PairBatch) -> LossOutput:
        # Check on the CPU: an invalid id on a GPU triggers a device-side assert that kills the process.
        if not has_image_source:
            check_ids_shape_dtype_range(batch.source, settings.source_vocab_size)
        check_ids_shape_dtype_range(batch.ids, settings.vocab_size)
        check_ids_shape_dtype_range(batch.targets.clamp(min=0), settings.vocab_size)
        is_training = torch.is_grad_enabled()
        with autocast(), nullcontext() if is_training else force_eager():
            loss, *metric_sums = compute_sums(batch.to(device), config.label_smoothing if is_training else 0.0)
        if not metric_sums:
            return LossOutput(loss)
        unsmoothed_loss, n_correct, n = metric_sums
        metrics = {"accuracy": Metric(n_correct.float(), n)}
        if is_training and config.label_smoothing:
            metrics["unsmoothed_loss"] = Metric(unsmoothed_loss, n)
        return LossOutput(loss, metrics)

    return objective


def _compile_blocks(model: Seq2Seq | RNNSeq2Seq) -> None:
    """Compile the blocks of the model in place.

    All blocks of the same kind share the compiled code, and dynamic shapes cover all batches. Compilation therefore
    takes seconds, whereas compiling the full model at once would take minutes.
    """
    # `build_train_step` creates the objective with the faster modules in place, so it is those that are compiled.
    for block in model.modules():
        if isinstance(block, Block):
            block.compile(dynamic=True)


def _loss_sums_and_token_counts(logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, ...]:
    """Return the loss, the loss without label smoothing, the number of correct tokens and the number of tokens."""
    n_correct = (logits.detach().argmax(-1) == targets).sum()
    unsmoothed_loss = cross_entropy_sum(logits.detach(), targets)
    return (
        cross_entropy_sum(logits, targets, smoothing=smoothing),
        unsmoothed_loss,
        n_correct,
        (targets != IGNORE_INDEX).sum(),
    )


def force_eager() -> AbstractContextManager[object]:
    """Run compiled code eagerly while the context is active.

    Evaluation and generation use different shapes, a cache and no gradients, which would trigger recompilation.
    """
    return torch.compiler.set_stance("force_eager")
