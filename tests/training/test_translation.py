"""Translators learn from true prefixes: what is padding or still to come changes nothing, and a run resumes exactly."""

import json
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from qkv.config import TrainingConfig
from qkv.data.pair_batches import PairBatch
from qkv.errors import ConfigError, InputError
from qkv.models import build
from qkv.tensors import IGNORE_INDEX
from qkv.training import open_run, resume_preparation
from qkv.training.translation import translation_objective
from qkv.weights.model_loader import load_model
from tests.data.pair_corpus import reversed_pairs, write_tsv
from tests.training.runs import (
    build_cpu_trainer,
    checkpoint_contents,
    copy_run,
    logged_metrics,
    resume_to_end,
    train_until_signal,
)
from tests.training.translation_runs import prepare_small_run, recipe

FAMILIES = ["seq2seq", "rnn"]


@pytest.fixture(scope="module", params=FAMILIES)
def prepared(request, tmp_path_factory):
    return prepare_small_run(tmp_path_factory.mktemp(request.param), recipe(request.param))


def objective_of(prepared, **training):
    model = build(prepared.config, seed=1).eval()
    settings = {"steps": 1, "batch_size": 1, "seq_len": 24, "warmup_steps": 0} | training
    return model, translation_objective(model, TrainingConfig(**settings))


def loss_of(objective, batch) -> float:
    return objective(batch).loss.item()


def with_more_padding(batch: PairBatch) -> PairBatch:
    return replace(
        batch,
        source=F.pad(batch.source, (0, 5), value=9),
        ids=F.pad(batch.ids, (0, 5), value=9),
        targets=F.pad(batch.targets, (0, 5), value=IGNORE_INDEX),
    )


def test_padding_does_not_change_the_loss(prepared):
    _, objective = objective_of(prepared)
    batch = prepared.corpus.data(prepared.recipe.training).batch(0)
    assert loss_of(objective, with_more_padding(batch)) == pytest.approx(loss_of(objective, batch), rel=1e-5)
    is_padding = ~batch.source_attention_mask
    noisy = replace(batch, source=batch.source.masked_fill(is_padding, 17))
    assert loss_of(objective, noisy) == pytest.approx(loss_of(objective, batch), rel=1e-6)


def test_later_target_tokens_do_not_change_the_loss_and_the_source_does(prepared):
    _, objective = objective_of(prepared)
    batch = prepared.corpus.data(prepared.recipe.training).batch(0)
    first = batch.targets.clone()
    first[:, 1:] = IGNORE_INDEX
    first_target_only = replace(batch, targets=first)
    later = batch.ids.clone()
    later[:, 1:] = 11
    assert loss_of(objective, replace(first_target_only, ids=later)) == loss_of(objective, first_target_only)
    assert loss_of(objective, replace(first_target_only, source=batch.source.roll(1, 0))) != loss_of(
        objective, first_target_only
    )


def test_source_and_target_are_not_interchangeable(prepared):
    """The source is read by the encoder and the target by the decoder: the other way round scores otherwise."""
    model, objective = objective_of(prepared)
    batch = prepared.corpus.data(prepared.recipe.training).batch(0)
    logits = model(batch.source, batch.ids, source_attention_mask=batch.source_attention_mask)
    expected = F.cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    assert loss_of(objective, batch) == pytest.approx(expected.item(), rel=1e-5)
    texts = (
        prepared.corpus.tokenizer.decode(batch.source[0].tolist()),
        prepared.corpus.tokenizer.decode(batch.ids[0].tolist()),
    )
    assert (texts[0].islower(), texts[1].isupper()) == (True, True)


def test_label_smoothing_applies_in_training_only_and_both_losses_are_logged(prepared):
    model, objective = objective_of(prepared, label_smoothing=0.1)
    batch = prepared.corpus.data(prepared.recipe.training).batch(0)
    logits = model(batch.source, batch.ids, source_attention_mask=batch.source_attention_mask).flatten(0, 1)
    wanted = batch.targets.flatten()
    plain, smoothed = (
        F.cross_entropy(logits, wanted, reduction="sum", label_smoothing=smoothing).item() for smoothing in (0.0, 0.1)
    )
    output = objective(batch)
    assert output.loss.item() == pytest.approx(smoothed, rel=1e-5)
    assert output.metrics["unsmoothed_loss"].total.item() == pytest.approx(plain, rel=1e-5)
    right = (logits.argmax(-1) == wanted).sum().item()
    assert output.metrics["accuracy"].total.item() == right
    assert output.metrics["accuracy"].count.item() == batch.n_targets
    with torch.no_grad():
        assert loss_of(objective, batch) == pytest.approx(plain, rel=1e-5)


def test_micro_batch_losses_add_up_to_the_batch_loss(prepared):
    _, objective = objective_of(prepared, label_smoothing=0.1)
    batch = prepared.corpus.data(prepared.recipe.training).batch(0)
    assert sum(loss_of(objective, part) for part in batch.split(3)) == pytest.approx(
        loss_of(objective, batch), rel=1e-5
    )


def test_the_chunked_loss_equals_the_full_loss_and_raises_an_error_for_an_rnn(prepared):
    if prepared.recipe.family == "rnn":
        with pytest.raises(ConfigError, match=r"compile and loss_chunk_size .*rnn"):
            objective_of(prepared, loss_chunk_size=7)
        return
    batch = prepared.corpus.data(prepared.recipe.training).batch(0)
    _, plain = objective_of(prepared, label_smoothing=0.1)
    _, chunked = objective_of(prepared, label_smoothing=0.1, loss_chunk_size=7)
    assert loss_of(chunked, batch) == pytest.approx(loss_of(plain, batch), rel=1e-5)


def test_an_interrupted_run_resumes_bit_for_bit(prepared, tmp_path):
    uninterrupted, interrupted = (copy_run(prepared, tmp_path / name) for name in ("whole", "parted"))
    build_cpu_trainer(uninterrupted).train()
    train_until_signal(build_cpu_trainer(interrupted), 4)
    resume_to_end(interrupted.run.path)
    assert logged_metrics(uninterrupted.run.path) == logged_metrics(interrupted.run.path)
    assert checkpoint_contents(uninterrupted.run.path) == checkpoint_contents(interrupted.run.path)


def test_an_evaluation_has_bleu_chrf_and_samples(prepared, tmp_path):
    copy = copy_run(prepared, tmp_path / "run")
    build_cpu_trainer(copy).train()
    lines = [json.loads(line) for line in (copy.run.path / "metrics.jsonl").read_text().splitlines()]
    (*_, last) = [line for line in lines if "validation_loss" in line]
    assert {"bleu", "chrf", "validation_accuracy"} <= last.keys()
    assert len(last["samples"]) == 4
    assert "nrefs:1|case:mixed" in last["samples"][-1]


def test_validation_pairs_are_excluded_from_training_and_dropped_pairs_are_reported(tmp_path):
    pairs = reversed_pairs(60, shortest=4, longest=9)
    write_tsv(tmp_path / "dev.tsv", pairs[:7])
    chosen = recipe("rnn", data={"validation": ("dev.tsv",), "validation_fraction": None}, seq_len=8)
    prepared = prepare_small_run(tmp_path, chosen)  # pairs.tsv's 200 begin with other lengths than these
    corpus = prepared.corpus
    held_out = {corpus.validation.text(0, i) for i in range(len(corpus.validation))}
    assert held_out == {source for source, _ in pairs[:7]}
    assert not held_out & {corpus.train.text(0, i) for i in range(len(corpus.train))}
    assert "repeated" in corpus.summary
    assert "too long" in corpus.summary
    assert corpus.summary.endswith("7 held-out pairs")


def test_swapped_files_and_unknown_repeats_raise_an_error(tmp_path):
    write_tsv(tmp_path / "dev.tsv", [(target, source) for source, target in reversed_pairs(20, seed=3)])
    swapped = recipe("rnn", data={"validation": ("dev.tsv",), "validation_fraction": None})
    with pytest.raises(InputError, match=r"dev\.tsv: .*\bswapped\b"):
        prepare_small_run(tmp_path, swapped)
    with pytest.raises(ConfigError, match=r"pairs\.repeat .*'other\.tsv'.* data\.train: pairs\.tsv"):
        prepare_small_run(tmp_path / "b", recipe("rnn", pairs={"repeat": {"other.tsv": 2}}))


def test_separate_vocabularies_are_saved_in_the_checkpoint(tmp_path):
    prepared = prepare_small_run(tmp_path, recipe("rnn", pairs={"source_vocab_size": 270}, steps=1, warmup_steps=0))
    build_cpu_trainer(prepared).train()
    loaded = load_model(prepared.run.checkpoint_folder(1))
    assert loaded.model.config.source_vocab_size == 270
    assert loaded.source_tokenizer.encode("a b c") == prepared.corpus.train.tokenizers[0].encode("a b c")
    assert loaded.source_tokenizer.encode("A B") != loaded.tokenizer.encode("A B")


def test_an_interrupted_preparation_can_be_resumed(tmp_path, monkeypatch):
    import qkv.data.pair_store

    uninterrupted = prepare_small_run(tmp_path / "whole", recipe("rnn"))
    prepare = qkv.data.pair_store.prepare_store

    def killed(files, folder, **kwargs):
        if folder.name == "target":
            raise KeyboardInterrupt
        return prepare(files, folder, **kwargs)

    monkeypatch.setattr(qkv.data.pair_store, "prepare_store", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare_small_run(tmp_path / "killed", recipe("rnn"))
    monkeypatch.undo()
    resumed = resume_preparation(tmp_path / "killed" / "run", progress=lambda _label: lambda _n, _all: None)
    for t in (0, 3):
        expected, actual = (p.corpus.data(p.recipe.training).batch(t) for p in (uninterrupted, resumed))
        assert torch.equal(expected.source, actual.source)
    assert open_run(uninterrupted.run.path).corpus.summary == resumed.corpus.summary


@pytest.mark.compiled
@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # torch's own, when it compiles
def test_compiled_steps_equal_eager_steps_for_every_shape(tmp_path):
    ready = prepare_small_run(tmp_path / "plain", recipe("seq2seq"))
    plain = build_cpu_trainer(ready)
    compiled = build_cpu_trainer(copy_run(ready, tmp_path / "compiled", compile=True))
    shapes = set()
    for t in range(9):
        batch = plain.data.batch(t)
        shapes.add(batch.ids.shape)
        for trainer in (plain, compiled):
            trainer.model.eval()  # without dropout, which draws otherwise when compiled
        eager_output, compiled_output = (trainer.train_step.objective(batch) for trainer in (plain, compiled))
        assert eager_output.loss.item() == pytest.approx(compiled_output.loss.item(), rel=1e-5)
        for trainer, output in ((plain, eager_output), (compiled, compiled_output)):
            trainer.model.zero_grad()
            output.loss.backward()
        pairs = zip(plain.model.parameters(), compiled.model.parameters(), strict=True)
        assert all(torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-4) for a, b in pairs)
    assert len(shapes) == 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 8
    assert compiled.generation_metrics()["bleu"] >= 0.0  # decoding, with its cache, runs as written
