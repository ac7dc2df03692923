"""Tests for BERT pre-training."""

import random
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from qkv.config import Recipe
from qkv.errors import ConfigError, InputError
from qkv.training import PreparedRun, open_run, prepare_run, write_fingerprints_and_final_recipe
from tests.training.runs import (
    build_cpu_trainer,
    checkpoint_contents,
    copy_run,
    logged_metrics,
    resume_to_end,
    train_until_signal,
)

COLORS = ("red", "green", "blue", "black")
ANIMALS = ("cat", "dog", "cow", "hen")


def write_texts(path: Path, n_documents: int = 400) -> None:
    """Write documents whose sentences all name the same color and the same animal."""
    rng = random.Random(0)
    documents = []
    for _ in range(n_documents):
        color, animal = rng.choice(COLORS), rng.choice(ANIMALS)
        sentences = (f"The {color} {animal} saw a {color} house.", f"A {animal} ate {color} bread here.")
        documents.append(" ".join(rng.choices(sentences, k=5)))
    path.write_text("\n<|endoftext|>\n".join(documents))


def recipe(masking: dict | None = None, **training) -> Recipe:
    defaults = {
        "steps": 7,
        "batch_size": 6,
        "micro_batch_size": 2,
        "seq_len": 29,
        "optimizer": "muon",
        "warmup_steps": 2,
        "eval_every": 3,
        "save_every": 2,
        "eval_batches": 3,
    }
    return Recipe(
        family="bert",
        tokenizer={"kind": "wordpiece", "vocab_size": 71, "lowercase": True},
        model={"context_length": 29, "n_layers": 2, "d_model": 14, "n_heads": 2, "dropout": 0.1},
        data={"train": ("text.txt",), "validation_fraction": 0.1},
        masking=masking or {},
        training=defaults | training,
    )


def prepare_small_run(folder: Path, settings: Recipe) -> PreparedRun:
    prepared = prepare_run(settings, folder / "run", folder, progress=lambda _label: lambda _n, _all: None)
    write_fingerprints_and_final_recipe(prepared)
    return prepared


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> PreparedRun:
    folder = tmp_path_factory.mktemp("bert")
    write_texts(folder / "text.txt")
    return prepare_small_run(folder, recipe())


def gradients(prepared: PreparedRun) -> dict[str, torch.Tensor]:
    trainer = build_cpu_trainer(prepared)
    trainer.model.eval()  # no dropout, which differs between micro-batches
    trainer.train_step.compute_gradients(trainer.data.batch(0), 0)
    return {name: p.grad for name, p in trainer.model.named_parameters()}


def test_accumulated_gradients_equal_those_of_the_full_batch(bert, tmp_path):
    full = gradients(copy_run(bert, tmp_path / "full", micro_batch_size=6, max_grad_norm=None))
    for rows in (1, 2, 3):
        accumulated = gradients(copy_run(bert, tmp_path / str(rows), micro_batch_size=rows, max_grad_norm=None))
        for name, gradient in full.items():
            torch.testing.assert_close(accumulated[name], gradient, rtol=1e-4, atol=1e-7)


@torch.no_grad()
def test_the_loss_is_the_sum_of_the_two_mean_losses(bert):
    trainer = build_cpu_trainer(bert)
    model, batch = trainer.model.eval(), trainer.data.batch(0)
    output = trainer.train_step.objective(batch)
    states = model(batch.ids, segments=batch.segments, attention_mask=batch.attention_mask)
    targets = torch.full_like(batch.ids, -100)
    has_target = batch.targets >= 0
    targets[has_target.nonzero()[:, 0], batch.masked_positions[has_target]] = batch.targets[has_target]
    logits = model.masked_lm_logits(states)
    masked_lm_loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    next_sentence_loss = F.cross_entropy(model.next_sentence_logits(states), batch.next_sentence_labels)
    assert float(output.loss / batch.n_targets) == pytest.approx(float(masked_lm_loss + next_sentence_loss), rel=1e-5)
    metrics = {name: float(metric.total / metric.count) for name, metric in output.metrics.items()}
    assert metrics["masked_lm_loss"] == pytest.approx(float(masked_lm_loss), rel=1e-5)
    assert metrics["next_sentence_loss"] == pytest.approx(float(next_sentence_loss), rel=1e-5)
    is_correct = logits.argmax(-1)[targets >= 0] == targets[targets >= 0]
    assert metrics["masked_lm_accuracy"] == pytest.approx(float(is_correct.double().mean()))
    assert list(metrics)[2:] == ["next_sentence_loss", "next_sentence_accuracy"]


def test_a_resumed_run_equals_an_uninterrupted_one(bert, tmp_path):
    uninterrupted, resumed = copy_run(bert, tmp_path / "uninterrupted"), copy_run(bert, tmp_path / "resumed")
    build_cpu_trainer(uninterrupted).train()
    train_until_signal(build_cpu_trainer(resumed), 4)
    assert resume_to_end(resumed.run.path) == []
    assert logged_metrics(resumed.run.path) == logged_metrics(uninterrupted.run.path)
    assert checkpoint_contents(resumed.run.path) == checkpoint_contents(uninterrupted.run.path)
    last = logged_metrics(uninterrupted.run.path)[-1]
    names = ("masked_lm_loss", "masked_lm_accuracy", "next_sentence_loss", "next_sentence_accuracy")
    assert all(f"validation_{name}" in last for name in names)


def test_validation_does_not_depend_on_the_seed(bert, tmp_path):
    first, second = (build_cpu_trainer(copy_run(bert, tmp_path / str(seed), seed=seed)).data for seed in (1, 2))
    pairs = list(zip(first.validation(), second.validation(), strict=True))
    assert pairs
    assert all(torch.equal(a.ids, b.ids) for a, b in pairs)
    assert {len(a.ids) for a, _ in pairs} == {2}
    assert not torch.equal(first.batch(0).ids, second.batch(0).ids)


def test_masked_language_modeling_without_next_sentence_prediction(tmp_path):
    (tmp_path / "text.txt").write_text("The cat sat on the mat. The dog saw it. " * 9)
    prepared = prepare_small_run(tmp_path, recipe({"next_sentence": False}, steps=2))
    assert prepared.config.next_sentence_head is False
    build_cpu_trainer(prepared).train()
    assert not any("next" in name for name in logged_metrics(tmp_path / "run")[-1])
    with pytest.raises(InputError, match=r"masking.next_sentence=false"):
        prepare_run(recipe(), tmp_path / "other", tmp_path, progress=lambda _label: lambda _n, _all: None)
    assert not (tmp_path / "other").exists()


def test_unsupported_settings_raise_an_error(bert, tmp_path):
    with pytest.raises(ConfigError, match="loss_chunk_size"):
        build_cpu_trainer(copy_run(bert, tmp_path / "chunk", loss_chunk_size=5))
    with pytest.raises(ConfigError, match="family='gpt'"):
        recipe().replace(family="gpt")


def test_a_tiny_bert_learns_both_tasks(bert, tmp_path):
    model = {"context_length": 29, "n_layers": 2, "d_model": 64, "n_heads": 4, "d_ff": 128, "init_std": 0.05}
    copy = copy_run(
        bert,
        tmp_path / "run",
        steps=240,
        batch_size=32,
        micro_batch_size=32,
        learning_rate=1e-2,
        schedule="linear",
        min_lr_ratio=0.0,
        eval_every=240,
        save_every=240,
    )
    write_fingerprints_and_final_recipe(
        PreparedRun(run=copy.run, recipe=copy.recipe.replace(model=model), corpus=copy.corpus)
    )
    build_cpu_trainer(open_run(copy.run.path)).train()
    last = {name: float.fromhex(v) for name, v in logged_metrics(copy.run.path)[-1].items() if isinstance(v, str)}
    # Always predicting the most frequent token has 20 % accuracy, and guessing pairs 50 %.
    assert last["validation_masked_lm_accuracy"] > 0.8
    assert last["validation_next_sentence_accuracy"] > 0.7


@pytest.mark.compiled
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from torch.compile itself
def test_compiled_steps_equal_eager_steps(bert, tmp_path):
    eager = build_cpu_trainer(copy_run(bert, tmp_path / "eager", micro_batch_size=3))
    compiled = build_cpu_trainer(copy_run(bert, tmp_path / "compiled", micro_batch_size=3, compile=True))
    for trainer in (eager, compiled):
        trainer.model.eval()
    for t in range(3):  # different numbers of tokens and targets, same shape
        eager_output, compiled_output = (
            trainer.train_step.objective(next(trainer.data.batch(t).split(3))) for trainer in (eager, compiled)
        )
        torch.testing.assert_close(eager_output.loss, compiled_output.loss, rtol=1e-5, atol=1e-5)
        for name, metric in eager_output.metrics.items():
            torch.testing.assert_close(metric.total, compiled_output.metrics[name].total, rtol=1e-5, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 1
