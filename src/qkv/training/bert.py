"""Pre-training of BERT models: masked language modeling and next-sentence prediction."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from qkv.choices import Precision, SpecialTokenStyle
from qkv.config import MaskingConfig, Recipe, TrainingConfig
from qkv.data.documents import ProgressCallback
from qkv.data.masked_batches import MaskedBatch, MaskedBatches
from qkv.data.sentence_store import SentenceStore, prepare_sentence_store
from qkv.errors import ConfigError
from qkv.models import BERT, Model
from qkv.nn.embedding import check_ids_shape_dtype_range
from qkv.tensors import IGNORE_INDEX
from qkv.text import Tokenizer
from qkv.training.family import ProgressBars, TrainingData
from qkv.training.gpt import prepare_text_stores
from qkv.training.loop import EvaluationResult, evaluate
from qkv.training.objectives import (
    DeviceInputs,
    LossOutput,
    Metric,
    Objective,
    SplitObjective,
    TrainingBatch,
    autocast_factory,
    cross_entropy_sum,
)

VALIDATION_SEED = 0
"""Validation seed. It is independent of the run's seed so that all runs are evaluated on the same pairs and masked
tokens."""

_EVAL_BATCH_SIZE = 32  # larger batches are not faster on a CPU
_TaskSums = tuple[Tensor, Tensor, Tensor]
"""Summed loss, number of correct predictions and number of predictions."""


class BERTFamily:
    """The BERT model family, which is trained on text files split into documents and sentences.

    Sentence pairs and masked tokens are sampled again in every epoch.
    """

    def prepare(self, recipe: Recipe, folder: Path, data_folder: Path, *, progress: ProgressBars) -> None:
        prepare_text_stores(
            recipe,
            folder,
            data_folder,
            specials=SpecialTokenStyle.BERT,
            write_store=_write_sentence_store,
            progress=progress,
        )

    def open(self, recipe: Recipe, folder: Path) -> "SentenceCorpus":
        assert recipe.masking is not None
        train, validation = SentenceStore.open(folder / "train"), None
        tokenizer = train.store.tokenizer()
        if recipe.data.validation:
            validation = SentenceStore.open(folder / "validation")
        elif recipe.data.validation_fraction is not None:
            train, validation = train.split(recipe.data.validation_fraction)
        corpus = SentenceCorpus(tokenizer=tokenizer, examples=recipe.masking, train=train, validation=validation)
        corpus.data(recipe.training)  # fails early if the texts yield no pairs, before the model is built
        return corpus

    def objective(self, model: BERT, training: TrainingConfig) -> Objective:
        return bert_pretraining_objective(model, training)


@dataclass(frozen=True, kw_only=True)
class SentenceCorpus:
    """Sentence stores for masked language modeling and next-sentence prediction."""

    tokenizer: Tokenizer
    examples: MaskingConfig
    train: SentenceStore
    validation: SentenceStore | None

    @property
    def summary(self) -> str:
        n_train, n_held_out = self.n_tokens
        return (
            f"{n_train:,} training tokens in {len(self.train.document_range):,} documents, {n_held_out:,} held-out "
            "tokens"
        )

    @property
    def n_tokens(self) -> tuple[int, int]:
        return self.train.n_text_tokens, 0 if self.validation is None else self.validation.n_text_tokens

    def data(self, training: TrainingConfig) -> TrainingData:
        batches = self._batches(self.train, training, rows=training.batch_size, seed=training.seed)
        if self.validation is None:
            return TrainingData(batch=batches.batch)
        held_out = self._batches(self.validation, training, rows=training.micro_batch_size, seed=VALIDATION_SEED)
        # Keep only full batches so that a compiled model sees a single shape.
        n = max(1, held_out.pair_sampler.n_examples // training.micro_batch_size)
        n = n if training.eval_batches is None else min(n, training.eval_batches)
        return TrainingData(batch=batches.batch, validation=lambda: (held_out.batch(t) for t in range(n)))

    def _batches(self, source: SentenceStore, training: TrainingConfig, *, rows: int, seed: int) -> MaskedBatches:
        return MaskedBatches(
            source=source,
            tokenizer=self.tokenizer,
            config=self.examples,
            seq_len=training.seq_len,
            batch_size=rows,
            seed=seed,
        )

    def generation_metrics(self, model: Model, training: TrainingConfig) -> Mapping[str, Any]:  # noqa: ARG002
        return {}


def bert_pretraining_objective(model: BERT, config: TrainingConfig) -> Objective:
    """Return the objective for masked language modeling and, if the batches are labeled, next-sentence prediction.

    The trainer divides the loss by the number of masked tokens. The next-sentence loss is therefore multiplied by the
    number of masked tokens per row so that the result is the sum of the two mean losses, as in the paper. Logits are
    computed only at masked positions, which are about a seventh of all positions.
    """
    if config.loss_chunk_size is not None:
        raise ConfigError(
            "loss_chunk_size is not supported for family='bert', which computes logits only at masked positions; "
            "reduce micro_batch_size to save memory"
        )
    device, vocab_size = model.embedding.token.weight.device, model.config.vocab_size
    autocast = autocast_factory(config.precision, device)

    def task_sums(
        ids: Tensor,
        segments: Tensor,
        attention_mask: Tensor,
        masked_positions: Tensor,
        targets: Tensor,
        next_sentence_labels: Tensor | None,
    ) -> dict[str, _TaskSums]:
        states = model(ids, segments=segments, attention_mask=attention_mask)
        masked_states = states.gather(1, masked_positions[..., None].expand(-1, -1, states.shape[-1]))
        sums = {"masked_lm": _loss_and_accuracy_sums(model.masked_lm_logits(masked_states), targets)}
        if next_sentence_labels is not None:
            sums["next_sentence"] = _loss_and_accuracy_sums(model.next_sentence_logits(states), next_sentence_labels)
        return sums

    compute = torch.compile(task_sums, dynamic=False) if config.compile else task_sums

    def to_device(batch: MaskedBatch) -> DeviceInputs:
        # Check on the CPU: an invalid id on a GPU triggers a device-side assert that kills the process.
        check_ids_shape_dtype_range(batch.ids, vocab_size)
        check_ids_shape_dtype_range(batch.targets.clamp(min=0), vocab_size)
        on_device = batch.to(device)
        full_batch_targets_per_row = torch.full((), batch.full_batch_targets_per_row, device=device)
        return (
            full_batch_targets_per_row,
            on_device.ids,
            on_device.segments,
            on_device.attention_mask,
            on_device.masked_positions,
            on_device.targets,
            on_device.next_sentence_labels,
        )

    def compute_loss(full_batch_targets_per_row: Tensor, *inputs: Any) -> LossOutput:  # noqa: ANN401 - the arguments of `task_sums`
        with autocast():
            sums = compute(*inputs)
        metrics = {}
        for name, (loss, n_correct, n) in sums.items():
            metrics[f"{name}_loss"], metrics[f"{name}_accuracy"] = Metric(loss, n), Metric(n_correct, n)
        loss = sums["masked_lm"][0]
        if "next_sentence" in sums:
            loss = loss + full_batch_targets_per_row * sums["next_sentence"][0]
        return LossOutput(loss, metrics)

    return SplitObjective(to_device, compute_loss)


def evaluate_bert_pretraining(
    model: BERT, tokenizer: Tokenizer, files: Sequence[str | Path], *, progress: ProgressBars
) -> EvaluationResult:
    """Evaluate a BERT model on text files.

    Masked language modeling is always evaluated. Next-sentence prediction is evaluated only if the model has that head.
    """
    training = TrainingConfig(
        steps=1,
        batch_size=_EVAL_BATCH_SIZE,
        seq_len=model.config.context_length,
        warmup_steps=0,
        precision=Precision.FP32,
    )
    examples = MaskingConfig(next_sentence=model.next_sentence is not None)
    with TemporaryDirectory() as folder:
        store = prepare_sentence_store(files, Path(folder) / "store", tokenizer=tokenizer, progress=progress("reading"))
        corpus = SentenceCorpus(tokenizer=tokenizer, examples=examples, train=store, validation=store)
        batches = corpus.data(training).validation
        assert batches is not None
        update_bar, n = progress("evaluating"), store.n_text_tokens
        return evaluate(model, bert_pretraining_objective(model, training), _report_progress(batches(), update_bar, n))


def _report_progress(
    batches: Iterable[TrainingBatch], update_bar: ProgressCallback, n_tokens: int
) -> Iterator[TrainingBatch]:
    n_done = 0
    for batch in batches:
        yield batch
        n_done += batch.n_tokens
        update_bar(min(n_done, n_tokens), n_tokens)


def _loss_and_accuracy_sums(logits: Tensor, targets: Tensor) -> _TaskSums:
    n_correct = (logits.detach().argmax(-1) == targets).sum()
    return cross_entropy_sum(logits, targets), n_correct.float(), (targets != IGNORE_INDEX).sum()


def _write_sentence_store(
    files: list[Path], folder: Path, tokenizer: Tokenizer, progress: ProgressCallback
) -> SentenceStore:
    return prepare_sentence_store(files, folder, tokenizer=tokenizer, progress=progress)
