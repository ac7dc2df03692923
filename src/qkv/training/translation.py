"""Prepare sentence pairs, and train translation models with teacher forcing."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qkv.choices import SpecialToken, SpecialTokenStyle
from qkv.config import PairsConfig, Recipe, Seq2SeqConfig, TrainingConfig
from qkv.data.documents import ProgressCallback, resolve_data_files
from qkv.data.pair_batches import PairBatch, PairBatches
from qkv.data.pair_files import (
    EmptyUnevenDuplicatePairFilter,
    Pair,
    PairFile,
    check_languages_not_swapped,
    split_pairs,
    take_sample,
)
from qkv.data.pair_store import (
    PAIRS_FILE,
    SIDES,
    TEXTS_FILE,
    PairStore,
    iterate_pair_texts,
    tokenize_and_delete_pair_texts,
    write_pair_texts_and_counts,
)
from qkv.engines import decode_engine
from qkv.errors import ConfigError, InputError
from qkv.generation.translate import translate
from qkv.models import Model, RNNSeq2Seq, Seq2Seq
from qkv.nn import Block
from qkv.nn.embedding import check_ids_shape_dtype_range
from qkv.tensors import IGNORE_INDEX
from qkv.text import Tokenizer, load_tokenizer, train_tokenizer
from qkv.text.translation_metrics import score_translations
from qkv.training.family import ProgressBars, TrainingData
from qkv.training.gpt import TOKENIZER_CHARACTERS
from qkv.training.objectives import LossOutput, Metric, Objective, autocast_factory, chunked_loss_sum, cross_entropy_sum

N_SAMPLES = 3
"""Number of sample translations that are logged in each evaluation."""
_TRANSLATION_BATCH_SIZE = 100


class TranslationFamily:
    """The translation model family.

    The models are trained on sentence pairs, with a joint vocabulary or one vocabulary per language.
    """

    def prepare(self, recipe: Recipe, folder: Path, data_folder: Path, *, progress: ProgressBars) -> None:
        settings = _get_pairs_config(recipe)
        if settings.n_eval_translations and (recipe.data.validation or recipe.data.validation_fraction):
            score_translations(
                ["now"], ["now"], n_bootstrap_samples=0
            )  # raises an error now, rather than at the first evaluation, if sacrebleu is missing
        if not (folder / "train" / PAIRS_FILE).exists():
            _write_clean_train_and_validation_pairs(recipe, folder, data_folder, progress("cleaning the pairs"))
        tokenizers = _load_or_train_pair_tokenizers(
            recipe, folder / "train", data_folder, progress("training the tokenizer")
        )
        for part in ("train", "validation"):
            if (folder / part / PAIRS_FILE).exists():
                tokenize_and_delete_pair_texts(folder / part, tokenizers, progress=progress)

    def open(self, recipe: Recipe, folder: Path) -> "PairsCorpus":
        has_validation = (folder / "validation" / PAIRS_FILE).exists()
        return PairsCorpus(
            settings=_get_pairs_config(recipe),
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


def _get_pairs_config(recipe: Recipe) -> PairsConfig:
    assert recipe.pairs is not None  # guaranteed by the validation of Recipe
    return recipe.pairs


def _write_clean_train_and_validation_pairs(
    recipe: Recipe, folder: Path, data_folder: Path, progress: ProgressCallback
) -> None:
    """Clean the sentence pairs and write them to the training and validation stores.

    The validation store is written first, so both stores are complete if the training store exists.
    """
    settings = _get_pairs_config(recipe)
    train = _find_pair_files_by_pattern(recipe.data.train, data_folder, settings)
    validation = _find_pair_files_by_pattern(recipe.data.validation, data_folder, settings)
    if unknown := [name for name in settings.repeat if name not in train]:
        raise ConfigError(
            f"pairs.repeat contains the key '{unknown[0]}', which is not in data.train: {', '.join(train)}"
        )
    first = take_sample(next(iter(train.values()))[0].read())
    for file in chain.from_iterable((*train.values(), *validation.values())):
        check_languages_not_swapped(first, file.read(), name=str(file.source))
    cleaner = EmptyUnevenDuplicatePairFilter(max_length_ratio=settings.max_length_ratio)
    if validation:
        # Clean the validation pairs first so that the same cleaner then drops their duplicates from the training data.
        write_pair_texts_and_counts(
            _read_clean_pairs(validation, cleaner, progress), folder / "validation", dropped=cleaner.dropped
        )
        cleaner.dropped.clear()
    pairs = _read_clean_pairs(train, cleaner, progress)
    if recipe.data.validation_fraction is not None:
        pairs = _write_validation_and_return_train(
            pairs, recipe.data.validation_fraction, folder, seed=recipe.training.seed
        )
    write_pair_texts_and_counts(pairs, folder / "train", dropped=cleaner.dropped)


def _find_pair_files_by_pattern(
    patterns: tuple[str, ...], data_folder: Path, settings: PairsConfig
) -> dict[str, list[PairFile]]:
    return {
        pattern: [
            PairFile.from_source(path, settings.target_suffix) for path in resolve_data_files((pattern,), data_folder)
        ]
        for pattern in patterns
    }


def _read_clean_pairs(
    files: Mapping[str, list[PairFile]], cleaner: EmptyUnevenDuplicatePairFilter, progress: ProgressCallback
) -> dict[str, Iterable[Pair]]:
    """Read and clean the files lazily, one after the other."""

    def read_files(pair_files: list[PairFile]) -> Iterator[Pair]:
        return chain.from_iterable(cleaner(file.read(progress)) for file in pair_files)

    return {name: read_files(pair_files) for name, pair_files in files.items()}


def _write_validation_and_return_train(
    files: Mapping[str, Iterable[Pair]], fraction: float, folder: Path, *, seed: int
) -> dict[str, list[Pair]]:
    """Hold out a fraction of the pairs for validation and return the remaining pairs for training.

    The pairs are split by connected components so that no validation sentence occurs in the training data.
    """
    pairs_by_file = {name: list(pairs) for name, pairs in files.items()}
    all_pairs = list(chain.from_iterable(pairs_by_file.values()))
    n_held_out = round(fraction * len(all_pairs))
    if not 0 < n_held_out < len(all_pairs):
        raise InputError(f"{len(all_pairs)} pairs are not enough to hold out {fraction:.0%} for validation")
    split = split_pairs(all_pairs, n_dev=n_held_out, n_test=0, seed=seed)
    write_pair_texts_and_counts({"held out": [all_pairs[i] for i in split.dev]}, folder / "validation", dropped={})
    train_rows, remaining, first = set(split.train.tolist()), {}, 0
    for name, pairs in pairs_by_file.items():
        remaining[name] = [pair for i, pair in enumerate(pairs, first) if i in train_rows]
        first += len(pairs)
    return remaining


def _load_or_train_pair_tokenizers(
    recipe: Recipe, folder: Path, relative_to: Path, progress: ProgressCallback
) -> dict[str, Tokenizer]:
    """Prepare the source and target tokenizers.

    Each tokenizer is taken from an interrupted earlier call, loaded from the path in the recipe (relative to
    `relative_to`), or trained on the pairs.
    """
    settings = _get_pairs_config(recipe)
    is_joint = settings.source_vocab_size is None
    sizes = {"source": settings.source_vocab_size or 0, "target": recipe.tokenizer.vocab_size}
    tokenizers: dict[str, Tokenizer] = {}
    for side in SIDES:
        tokenizer_folder = folder / ("source" if is_joint else side)
        if (tokenizer_folder / "tokenizer.json").is_file():
            tokenizers[side] = load_tokenizer(tokenizer_folder)
        elif is_joint and tokenizers:
            tokenizers[side] = tokenizers["source"]
        elif recipe.tokenizer.path is not None and (is_joint or side == "target"):
            tokenizers[side] = load_tokenizer(relative_to / recipe.tokenizer.path)
        else:
            size = sizes["target" if is_joint else side]
            tokenizers[side] = _train_pair_tokenizer(recipe, folder, None if is_joint else side, size=size)
    n_ids = tokenizers["target"].vocab_size
    if recipe.tokenizer.path is not None and n_ids != recipe.tokenizer.vocab_size:
        raise ConfigError(
            f"tokenizer.vocab_size must be {n_ids}, the size of {recipe.tokenizer.path}, got "
            f"{recipe.tokenizer.vocab_size}"
        )
    progress(1, 1)
    return tokenizers


def _train_pair_tokenizer(recipe: Recipe, folder: Path, side: str | None, *, size: int) -> Tokenizer:
    settings = recipe.tokenizer
    # For a very large corpus, every n-th pair is sufficient.
    step = 1 + (folder / TEXTS_FILE).stat().st_size // (2 * TOKENIZER_CHARACTERS)
    texts = iterate_pair_texts(folder, side=side, repeat=_get_pairs_config(recipe).repeat, step=step)
    return train_tokenizer(
        settings.kind,
        texts,
        vocab_size=size,
        style=SpecialTokenStyle.SEQ2SEQ,
        lowercase=settings.lowercase,
        add_prefix_space=True,
    )
