"""Fine-tuning learns classes, labels and numbers, resumes bit by bit, and leaves alone what it was told to."""

import json
import os
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
from qkv.training.finetune import FinetuneInputs, build_task_model, choose_training_config, fine_tune, freeze
from qkv.training.finetune_data import build_task, draw
from qkv.weights.folder import read_tensors
from tests.training.classifiers import BAD, GOOD, reviews, small_bert, small_tokenizer, words


def quiet(_said):
    pass


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


def gathered(tokenizer, train=None, held_out=None, *, start=None, **settings):
    usual = {"models": ("small",), "train": "t", "epochs": 2, "batch_size": 8, "learning_rate": 3e-3}
    config = FinetuningConfig(**(usual | settings))
    train = labeled_texts_from_rows("train", train or reviews(97))
    held_out = labeled_texts_from_rows("eval", held_out or reviews(31, seed=500))
    task = build_task(config, train, held_out)
    return FinetuneInputs.prepare(start or small_bert(tokenizer), tokenizer, task, config, log=quiet)


def tuned(material, folder, *, seed=0, report=quiet, say=quiet):
    folder.mkdir(exist_ok=True)
    return fine_tune(material, seed=seed, folder=folder, device=torch.device("cpu"), report=report, log=say)


def weights(folder):
    return read_tensors(RunFolder(folder).best_checkpoint() / "model.safetensors")


def test_classes_are_learnt_and_named(tokenizer, tmp_path):
    result = tuned(gathered(tokenizer, epochs=6, learning_rate=1e-2), tmp_path / "a")
    assert result.scores["accuracy"] >= 0.95
    assert result.class_names == ["bad", "good"]
    assert np.trace(result.confusion) == round(31 * result.scores["accuracy"])
    config = json.loads((RunFolder(tmp_path / "a").best_checkpoint() / "config.json").read_text())
    assert (config["class_names"], config["problem_type"], config["dropout"]) == (["bad", "good"], "single-label", 0.1)


def test_the_second_text_of_a_pair_is_read(tokenizer, tmp_path):
    rows = [("the film was", words(i, GOOD if i % 2 else BAD), "yes" if i % 2 else "no") for i in range(97)]
    assert tuned(gathered(tokenizer, rows, rows[:31], epochs=6, learning_rate=1e-2), tmp_path).scores["accuracy"] >= 0.9


def test_several_labels_are_learnt_each_for_itself(tokenizer, tmp_path):
    told = ("fine", "dull", "great")
    texts = [f"{words(i, told)} {words(i + 900, (*told, 'poor'))}" for i in range(151)]
    rows = [(text, [word for word in told if word in text.split()]) for text in texts]
    material = gathered(tokenizer, rows, rows[:47], problem_type="multi-label", epochs=8, learning_rate=1e-2)
    assert tuned(material, tmp_path).scores["f1_micro"] >= 0.7


def test_a_number_is_learnt_from_its_mean_on(tokenizer, tmp_path):
    rows = [(" ".join(["film"] * (i % 7) + ["fine"] * (i % 5 + 1)), 50 + 3 * (i % 5)) for i in range(151)]
    material = gathered(tokenizer, rows, rows[:47], problem_type="regression", epochs=8)
    lines = []
    result = tuned(material, tmp_path, report=lines.append)
    assert result.scores["pearson"] >= 0.9
    # A share of the variance: guessing the mean misses 1.
    assert lines[0]["loss"] == pytest.approx(1.0, abs=0.5)


def test_a_run_resumed_is_the_unbroken_run(tokenizer, tmp_path):
    material = gathered(tokenizer)
    whole = tuned(material, tmp_path / "whole")

    def stop(entry):
        if entry["step"] == 7 and "loss" in entry:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SignalInterrupt, match="SIGTERM"):
        tuned(material, tmp_path / "cut", report=stop)
    said = []
    again = tuned(material, tmp_path / "cut", report=said.append)
    assert said[0]["step"] == 8
    assert again.scores == whole.scores
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert tuned(material, tmp_path / "cut", report=said.clear) == again
    assert said


def test_seeds_differ_and_repeat(tokenizer, tmp_path):
    material = gathered(tokenizer)
    losses = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        lines = []
        tuned(material, tmp_path / name, seed=seed, report=lines.append)
        losses.append([line["loss"] for line in lines if "loss" in line])
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize(
    ("settings", "learns"),
    [
        ({"freeze": 1}, lambda name: not name.startswith(("embedding.", "blocks.0."))),
        ({"freeze": "all"}, lambda name: name.startswith(("pooler.", "classifier."))),
        ({"lora_rank": 3}, lambda name: (".attention." in name and name.endswith("weight")) or "er." in name),
        ({}, lambda _name: True),
    ],
)  # fmt: skip
def test_only_what_may_learn_changes(tokenizer, tmp_path, settings, learns):
    start = small_bert(tokenizer)
    tuned(gathered(tokenizer, start=start, **settings), tmp_path)
    before, after = dict(start.named_parameters()), weights(tmp_path)
    for name, weight in after.items():
        if name.startswith("classifier."):
            continue
        may_learn = learns(name)
        if name.endswith(("key.bias", "segment.weight")):
            continue  # its gradient is zero: a bias of all keys alike changes no weight of attention
        assert torch.equal(weight, before[name]) != may_learn, name


def test_more_frozen_layers_than_there_are_is_refused(tokenizer):
    material = gathered(tokenizer, freeze=3)
    model, _ = build_task_model(material.start, material.task, material.settings, seed=0)
    with pytest.raises(ConfigError, match="freeze=3, but the model has 2 layers"):
        freeze_layers(model, material.settings, seed=0)


def test_a_new_head_is_said_and_a_fitting_one_is_kept(tokenizer):
    material = gathered(tokenizer)
    _, new = build_task_model(material.start, material.task, material.settings, seed=0)
    assert new == ["classifier.weight", "classifier.bias"]
    before = small_bert(tokenizer, seed=5, class_names=("bad", "good"), n_classes=2)
    model, new = build_task_model(before, material.task, material.settings, seed=0)
    assert new == []
    assert torch.equal(model.classifier.weight, before.classifier.weight)
    renamed = small_bert(tokenizer, seed=5, class_names=("good", "bad"), n_classes=2)
    assert build_task_model(renamed, material.task, material.settings, seed=0)[1] == ["classifier.weight", "classifier.bias"]


def test_from_scratch_takes_the_shape_alone(tokenizer):
    material = gathered(tokenizer, from_scratch=True)
    model, new = build_task_model(material.start, material.task, material.settings, seed=3)
    assert len(new) == len(list(model.parameters()))
    assert not torch.equal(model.blocks[0].attention.q_proj.weight, material.start.blocks[0].attention.q_proj.weight)


def test_a_tenth_is_held_out_where_nothing_else_is_given():
    settings = FinetuningConfig(models=("a",), train="t")
    task = build_task(settings, labeled_texts_from_rows("train", reviews(97)), None)
    assert (len(task.train.texts), len(task.evaluation.texts)) == (88, 9)
    assert not set(task.train.lines) & set(task.evaluation.lines)


def test_pairs_are_not_judged_by_single_texts():
    settings = FinetuningConfig(models=("a",), train="t")
    pairs = labeled_texts_from_rows("train", [("a", "b", "x"), ("c", "d", "y")])
    with pytest.raises(InputError, match="train and eval: one holds pairs, the other single texts"):
        build_task(settings, pairs, labeled_texts_from_rows("eval", [("a", "x")]))


def test_a_text_that_is_too_long_is_refused_or_cut_and_said(tokenizer, tmp_path):
    rows = [*reviews(40), (" ".join(["film"] * 30), "good")]
    message = r"train: line 41: 32 tokens, but the model's context_length is 23; 1 of 41 rows are too long: --truncate"
    with pytest.raises(ContextLengthError, match=message):
        gathered(tokenizer, rows)
    settings = FinetuningConfig(models=("a",), train="t", truncate=True)
    task = build_task(settings, labeled_texts_from_rows("train", rows), labeled_texts_from_rows("eval", reviews(9)))
    said = []
    material = FinetuneInputs.prepare(small_bert(tokenizer), tokenizer, task, settings, log=said.append)
    assert said == ["train: 1 of 41 texts were cut to 23 tokens"]
    assert len(material.encoded.train[40].ids) == 23


@given(st.lists(st.integers(0, 4), min_size=5, max_size=97), st.integers(1, 97), st.integers(0, 3))
def test_drawn_labels_keep_the_classes_shares(classes, n, seed):
    targets = torch.tensor(classes)
    if n > len(classes):
        with pytest.raises(InputError, match=f"{n} rows were asked for, and there are {len(classes)}"):
            sample_rows(ProblemType.SINGLE_LABEL, targets, n, seed=seed)
        return
    rows = sample_rows(ProblemType.SINGLE_LABEL, targets, n, seed=seed)
    assert len(set(rows.tolist())) == n
    there, drawn = np.bincount(classes, minlength=5), np.bincount(targets[rows], minlength=5)
    n_classes = np.count_nonzero(there)
    assert np.count_nonzero(drawn) == min(n, n_classes)
    assert np.abs(drawn - n * there / len(classes)).max() <= n_classes


def test_few_rows_get_many_epochs_and_many_rows_three():
    settings = FinetuningConfig(models=("a",), train="t")

    def chosen(n_rows, n_parameters=6_000_000, **changes):
        config = settings.replace(**changes)
        return choose_training_config(config, n_rows=n_rows, n_parameters=n_parameters, longest=50)

    small, middle, large = chosen(100), chosen(4500), chosen(67_349)
    assert [t.batch_size for t in (small, middle, large)] == [16, 32, 64]
    assert [t.steps for t in (small, middle, large)] == [20 * 7, 15 * 141, 3 * 1053]
    assert small.learning_rate == pytest.approx(2.14e-4, rel=0.01)
    assert chosen(100, 110_000_000).learning_rate == pytest.approx(5e-5)
    assert chosen(100, lora_rank=4).learning_rate == pytest.approx(1e-3)
    assert chosen(100, epochs=2, learning_rate=0.5).learning_rate == 0.5
