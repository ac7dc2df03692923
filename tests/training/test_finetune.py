"""Tests for fine-tuning."""

import json
import os
import re
import signal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.choices import ProblemType
from qkv.config import FinetuningConfig
from qkv.data.labeled_texts import labeled_texts_from_rows
from qkv.errors import ConfigError, ContextLengthError, InputError
from qkv.training import RunFolder, SignalInterrupt
from qkv.training.finetune import (
    FinetuneInputs,
    build_model_and_list_new_weights,
    choose_training_config,
    fine_tune_or_resume,
    freeze_layers_or_add_lora,
)
from qkv.training.finetune_data import build_task_with_evaluation_split, sample_rows
from qkv.weights.checkpoint_folder import read_safetensors
from tests.training.classifiers import BAD, GOOD, reviews, small_bert, small_tokenizer, words


def ignore(_message):
    pass


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


def prepare_inputs(tokenizer, train=None, held_out=None, *, start=None, **settings):
    defaults = {"models": ("small",), "train": "t", "epochs": 2, "batch_size": 8, "learning_rate": 3e-3}
    config = FinetuningConfig(**(defaults | settings))
    train = labeled_texts_from_rows("train", train or reviews(97))
    held_out = labeled_texts_from_rows("eval", held_out or reviews(31, seed=500))
    task = build_task_with_evaluation_split(config, train, held_out)
    return FinetuneInputs.tokenize_task(start or small_bert(tokenizer), tokenizer, task, config, log=ignore)


def run_fine_tuning(inputs, folder, *, seed=0, report=ignore, log=ignore):
    folder.mkdir(exist_ok=True)
    return fine_tune_or_resume(inputs, seed=seed, folder=folder, device=torch.device("cpu"), report=report, log=log)


def weights(folder):
    return read_safetensors(RunFolder(folder).best_or_latest_checkpoint() / "model.safetensors")


def test_classes_are_learned_and_their_names_saved(tokenizer, tmp_path):
    result = run_fine_tuning(prepare_inputs(tokenizer, epochs=6, learning_rate=1e-2), tmp_path / "a")
    assert result.scores["accuracy"] >= 0.95
    assert result.class_names == ["bad", "good"]
    assert np.trace(result.confusion) == round(31 * result.scores["accuracy"])
    config = json.loads((RunFolder(tmp_path / "a").best_or_latest_checkpoint() / "config.json").read_text())
    assert (config["class_names"], config["problem_type"], config["dropout"]) == (["bad", "good"], "single-label", 0.1)


def test_the_second_text_of_a_pair_is_used(tokenizer, tmp_path):
    rows = [("the film was", words(i, GOOD if i % 2 else BAD), "yes" if i % 2 else "no") for i in range(97)]
    assert (
        run_fine_tuning(prepare_inputs(tokenizer, rows, rows[:31], epochs=6, learning_rate=1e-2), tmp_path).scores[
            "accuracy"
        ]
        >= 0.9
    )


def test_multiple_labels_are_learned_independently(tokenizer, tmp_path):
    labels = ("fine", "dull", "great")
    texts = [f"{words(i, labels)} {words(i + 900, (*labels, 'poor'))}" for i in range(151)]
    rows = [(text, [word for word in labels if word in text.split()]) for text in texts]
    inputs = prepare_inputs(tokenizer, rows, rows[:47], problem_type="multi-label", epochs=8, learning_rate=1e-2)
    assert run_fine_tuning(inputs, tmp_path).scores["f1_micro"] >= 0.7


def test_regression_starts_at_the_mean(tokenizer, tmp_path):
    rows = [(" ".join(["film"] * (i % 7) + ["fine"] * (i % 5 + 1)), 50 + 3 * (i % 5)) for i in range(151)]
    inputs = prepare_inputs(tokenizer, rows, rows[:47], problem_type="regression", epochs=8)
    lines = []
    result = run_fine_tuning(inputs, tmp_path, report=lines.append)
    assert result.scores["pearson"] >= 0.9
    # The loss is relative to the variance, so predicting the mean has a loss of 1.
    assert lines[0]["loss"] == pytest.approx(1.0, abs=0.5)


def test_a_resumed_fine_tuning_run_equals_an_uninterrupted_one(tokenizer, tmp_path):
    inputs = prepare_inputs(tokenizer)
    uninterrupted = run_fine_tuning(inputs, tmp_path / "uninterrupted")

    def stop(entry):
        if entry["step"] == 7 and "loss" in entry:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SignalInterrupt, match="SIGTERM"):
        run_fine_tuning(inputs, tmp_path / "resumed", report=stop)
    entries = []
    resumed = run_fine_tuning(inputs, tmp_path / "resumed", report=entries.append)
    assert entries[0]["step"] == 8
    assert resumed.scores == uninterrupted.scores
    first, second = weights(tmp_path / "uninterrupted"), weights(tmp_path / "resumed")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert run_fine_tuning(inputs, tmp_path / "resumed", report=entries.clear) == resumed
    assert entries


def test_runs_with_the_same_seed_are_identical_and_others_differ(tokenizer, tmp_path):
    inputs = prepare_inputs(tokenizer)
    losses = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        lines = []
        run_fine_tuning(inputs, tmp_path / name, seed=seed, report=lines.append)
        losses.append([line["loss"] for line in lines if "loss" in line])
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize(
    ("settings", "is_trainable"),
    [
        ({"freeze": 1}, lambda name: not name.startswith(("embedding.", "blocks.0."))),
        ({"freeze": "all"}, lambda name: name.startswith(("pooler.", "classifier."))),
        ({"lora_rank": 3}, lambda name: (".attention." in name and name.endswith("weight")) or "er." in name),
        ({}, lambda _name: True),
    ],
)
def test_only_trainable_weights_change(tokenizer, tmp_path, settings, is_trainable):
    start = small_bert(tokenizer)
    run_fine_tuning(prepare_inputs(tokenizer, start=start, **settings), tmp_path)
    before, after = dict(start.named_parameters()), weights(tmp_path)
    for name, weight in after.items():
        if name.startswith("classifier."):
            continue
        should_change = is_trainable(name)
        if name.endswith(("k_proj.bias", "segment.weight")):
            continue  # the gradient is zero: a bias of all keys does not change attention weights
        assert torch.equal(weight, before[name]) != should_change, name


def test_freezing_too_many_layers_raises_an_error(tokenizer):
    inputs = prepare_inputs(tokenizer, freeze=3)
    model, _ = build_model_and_list_new_weights(inputs.start, inputs.task, inputs.settings, seed=0)
    with pytest.raises(ConfigError, match=r"freeze .*\b2\b.*, got 3$"):
        freeze_layers_or_add_lora(model, inputs.settings, seed=0)


def test_a_matching_head_is_kept_and_another_is_reinitialized(tokenizer):
    inputs = prepare_inputs(tokenizer)
    _, new_weights = build_model_and_list_new_weights(inputs.start, inputs.task, inputs.settings, seed=0)
    assert new_weights == ["classifier.weight", "classifier.bias"]
    before = small_bert(tokenizer, seed=5, class_names=("bad", "good"), n_classes=2)
    model, new_weights = build_model_and_list_new_weights(before, inputs.task, inputs.settings, seed=0)
    assert new_weights == []
    assert torch.equal(model.classifier.weight, before.classifier.weight)
    renamed = small_bert(tokenizer, seed=5, class_names=("good", "bad"), n_classes=2)
    assert build_model_and_list_new_weights(renamed, inputs.task, inputs.settings, seed=0)[1] == [
        "classifier.weight",
        "classifier.bias",
    ]


def test_from_scratch_initializes_all_weights(tokenizer):
    inputs = prepare_inputs(tokenizer, from_scratch=True)
    model, new_weights = build_model_and_list_new_weights(inputs.start, inputs.task, inputs.settings, seed=3)
    assert len(new_weights) == len(list(model.parameters()))
    assert not torch.equal(model.blocks[0].attention.q_proj.weight, inputs.start.blocks[0].attention.q_proj.weight)


def test_ten_percent_are_held_out_without_an_evaluation_file():
    settings = FinetuningConfig(models=("a",), train="t")
    task = build_task_with_evaluation_split(settings, labeled_texts_from_rows("train", reviews(97)), None)
    assert (len(task.train.texts), len(task.evaluation.texts)) == (88, 9)
    assert not set(task.train.line_numbers) & set(task.evaluation.line_numbers)


def test_mixing_pairs_and_single_texts_raises_an_error():
    settings = FinetuningConfig(models=("a",), train="t")
    pairs = labeled_texts_from_rows("train", [("a", "b", "x"), ("c", "d", "y")])
    with pytest.raises(InputError, match="train and eval: "):
        build_task_with_evaluation_split(settings, pairs, labeled_texts_from_rows("eval", [("a", "x")]))


def test_a_text_that_is_too_long_raises_an_error_or_is_truncated(tokenizer, tmp_path):
    rows = [*reviews(40), (" ".join(["film"] * 30), "good")]
    with pytest.raises(ContextLengthError, match=r"train: line 41: 32\b.*\b23\b.*\b1 of 41\b.*--truncate"):
        prepare_inputs(tokenizer, rows)
    settings = FinetuningConfig(models=("a",), train="t", truncate=True)
    task = build_task_with_evaluation_split(
        settings, labeled_texts_from_rows("train", rows), labeled_texts_from_rows("eval", reviews(9))
    )
    messages = []
    inputs = FinetuneInputs.tokenize_task(small_bert(tokenizer), tokenizer, task, settings, log=messages.append)
    (message,) = messages
    assert re.match(r"train: 1 of 41\b.*\b23\b", message)
    assert len(inputs.encoded.train[40].ids) == 23


@given(st.lists(st.integers(0, 4), min_size=5, max_size=97), st.integers(1, 97), st.integers(0, 3))
def test_sampled_rows_are_stratified(classes, n, seed):
    targets = torch.tensor(classes)
    if n > len(classes):
        with pytest.raises(InputError, match=rf"\b{len(classes)}, got {n}$"):
            sample_rows(ProblemType.SINGLE_LABEL, targets, n, seed=seed)
        return
    rows = sample_rows(ProblemType.SINGLE_LABEL, targets, n, seed=seed)
    assert len(set(rows.tolist())) == n
    class_counts, sampled_counts = np.bincount(classes, minlength=5), np.bincount(targets[rows], minlength=5)
    n_classes = np.count_nonzero(class_counts)
    assert np.count_nonzero(sampled_counts) == min(n, n_classes)
    assert np.abs(sampled_counts - n * class_counts / len(classes)).max() <= n_classes


def test_few_rows_get_many_epochs_and_many_rows_three():
    settings = FinetuningConfig(models=("a",), train="t")

    def choose(n_rows, n_parameters=6_000_000, **changes):
        config = settings.replace(**changes)
        return choose_training_config(config, n_rows=n_rows, n_parameters=n_parameters, longest=50)

    small, middle, large = choose(100), choose(4500), choose(67_349)
    assert [t.batch_size for t in (small, middle, large)] == [16, 32, 64]
    assert [t.steps for t in (small, middle, large)] == [20 * 7, 15 * 141, 3 * 1053]
    assert small.learning_rate == pytest.approx(2.14e-4, rel=0.01)
    assert choose(100, 110_000_000).learning_rate == pytest.approx(5e-5)
    assert choose(100, lora_rank=4).learning_rate == pytest.approx(1e-3)
    assert choose(100, epochs=2, learning_rate=0.5).learning_rate == 0.5
