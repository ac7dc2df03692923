"""`qkv finetune`: labelled texts in, a table of scores and a model that classifies out; bad input in one line."""

import json
import os
import re
import signal

import pytest

import qkv
from qkv.training import finetune as finetuning
from tests.training.classifiers import model_folder, reviews, write_tsv


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("finetune")
    model_folder(path / "small")
    model_folder(path / "wide", d_model=26)
    write_tsv(path / "train.tsv", reviews(97))
    write_tsv(path / "dev.tsv", reviews(31, seed=500))
    return path


@pytest.fixture
def command(command, monkeypatch, folder):
    monkeypatch.chdir(folder)
    return command


QUICK = ("--epochs", 1, "--batch-size", 16, "--learning-rate", 0.01, "--device", "cpu")


def test_several_models_and_seeds_give_one_table(command, folder):
    data = ("--data", "train.tsv", "--eval", "dev.tsv", "--out", "comparison", "--seeds", 2)
    answer = command("finetune", "small", "wide", *data, *QUICK)
    assert answer.status == 0, answer.err
    head, *rows = answer.out.splitlines()
    assert re.split(r"  +", head) == ["model", "parameters", "accuracy", "f1 of good", "f1 macro", "mcc", "seconds"]
    assert [row.split()[0] for row in rows] == ["small", "wide"]
    assert all(row.count("±") == 4 for row in rows)
    assert "qkv: wide: new, with random weights: classifier.weight, classifier.bias\n" in answer.err
    assert "qkv: wide, seed 1: step 7 of 7: " in answer.err
    assert "rows to judge by" not in answer.err
    assert (folder / "comparison" / "wide" / "seed-1" / "confusion.png").read_bytes().startswith(b"\x89PNG")


def test_few_rows_to_judge_by_are_remarked_on_once(command):
    answer = command("finetune", "small", "wide", "--data", "train.tsv", "--out", "few", "--rows", 60, *QUICK)
    assert answer.err.count("9 rows to judge by are few, below 30") == 1


def test_a_run_is_a_model_that_classifies(command, folder):
    answer = command("finetune", "small", "--data", "train.tsv", "--out", "run", "--json", "--rows", 60, *QUICK)
    assert answer.status == 0, answer.err
    record = json.loads(answer.out)
    assert record["best"] == "run"
    assert "train.tsv: 9 rows to judge by are few, below 30: the scores will say little" in answer.err
    assert (record["runs"][0]["n_train"], record["runs"][0]["n_evaluation"]) == (60, 9)
    answers = qkv.load(folder / "run").classify(["it was great", "the dull film"])
    assert {answer.labels[0] for answer in answers} <= {"good", "bad"}


def test_a_run_that_stops_early_says_so_and_after_how_many_epochs(command):
    data = ("--data", "train.tsv", "--eval", "dev.tsv", "--out", "early", "--json", "--device", "cpu")
    # A learning rate of nearly 0: no evaluation is better than the first.
    slow = ("--epochs", 10, "--batch-size", 16, "--learning-rate", 1e-12, "--patience", 2)
    answer = command("finetune", "small", *data, *slow)
    (run,) = json.loads(answer.out)["runs"]
    assert (run["steps"], run["planned_steps"], run["best_step"]) == (21, 70, 7)
    assert "97 rows, stopped early, after 3.0 of 10 epochs: nothing was better than step 7 (--patience)" in answer.err


def test_a_stopped_run_is_gone_on_with(command, monkeypatch):
    class Stopping(finetuning.Trainer):
        def _log(self, entry):
            super()._log(entry)
            if entry["step"] == 3 and "loss" in entry:
                os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(finetuning, "Trainer", Stopping)
        answer = command("finetune", "small", "--data", "train.tsv", "--out", "cut", *QUICK)
    assert (answer.status, answer.out) == (130, "")
    assert answer.err.splitlines()[-1] == "qkv: stopped by SIGINT; go on: qkv finetune --resume cut"
    again = command("finetune", "--resume", "cut", "--device", "cpu")
    assert (again.status, len(again.out.splitlines())) == (0, 2)
    assert "step 1 of" not in again.err


def test_a_recipe_names_files_in_the_data_folder(command, folder):
    (folder / "a.toml").write_text('models = ["small"]\ntrain = "train.tsv"\nevaluation = "dev.tsv"\nbatch_size = 16\n')
    answer = command("finetune", "a.toml", "epochs=1", "--data", folder, "--out", "by-recipe", "--device", "cpu")
    assert answer.status == 0, answer.err
    assert "small: 97 rows, 1 epoch, learning rate" in answer.err


def test_the_lectures_three_parts_in_five_lines(folder, monkeypatch):
    monkeypatch.chdir(folder)
    task = qkv.load("small")
    preprocessor, backbone = task.tokenizer, task.model
    tuned = qkv.finetune(
        task, "train.tsv", "dev.tsv", settings=qkv.FinetuningSettings(epochs=6, batch_size=8, learning_rate=0.01)
    )
    assert tuned.scores["accuracy"] > 0.9
    assert tuned.task.classify(["it was lovely"])[0].labels == ("good",)
    assert preprocessor.fingerprint == tuned.task.tokenizer.fingerprint
    assert backbone.classifier is None
    rows = qkv.finetune("small", reviews(40), reviews(20, seed=9), settings=qkv.FinetuningSettings(epochs=1))
    assert rows.runs.results[0].n_train == 40


LONG = " ".join(["film"] * 30)
TOO_LONG = "but the model's context_length is 23; 1 of 2 rows are too long: --truncate cuts them"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("text\ttag\na\tx\n", "bad.tsv: has no column 'label' (it has: text, tag); name another: --label COLUMN"),
        ("text\tlabel\na\tx\nb\tx\n", "bad.tsv: all 2 rows have the label 'x'; there must be at least 2 to tell apart"),
        ("text\tlabel\na\tx\n\nb\ty\n", "bad.tsv: line 3: is empty, and rows follow it"),
        (b"text\tlabel\na\tx\n\xff\ty\n", "bad.tsv: line 3: byte 15 (0xFF) is not UTF-8"),
        (
            "text\tlabel\na\tx\nb\ty\n",
            "dev.tsv: line 2: the label 'bad' is not among the 2 of training (x, y)",
        ),
        (
            f"text\tlabel\nfilm\tbad\n{LONG}\tgood\n",
            f"bad.tsv: line 3: 32 tokens, {TOO_LONG}",
        ),
        (
            "text\tlabel\nfilm\tbad\n" + "film " * 200_000 + "\tgood\n",
            f"bad.tsv: line 3: 200,002 tokens, {TOO_LONG}",
        ),
    ],
)
def test_bad_rows_are_refused_in_one_line(command, folder, content, line):
    (folder / "bad.tsv").write_bytes(content.encode() if isinstance(content, str) else content)
    answer = command("finetune", "small", "--data", "bad.tsv", "--eval", "dev.tsv", "--out", f"o{hash(line)}", *QUICK)
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.splitlines()[-1] == f"qkv: error: {line}"
    assert "Traceback" not in answer.err


def test_nothing_is_remarked_on_before_a_model_is_refused(command, folder):
    write_tsv(folder / "few.tsv", reviews(7))
    answer = command("finetune", "stories", "--data", "few.tsv", "--eval", "few.tsv", "--out", "refused", *QUICK)
    assert answer.status == 2
    assert len(answer.err.splitlines()) == 1
    assert "stories: is a language model (GPT); a text encoder (BERT) is needed here" in answer.err
    assert not (folder / "refused").exists()


def test_a_score_that_is_no_number_is_refused(command, folder):
    write_tsv(folder / "scores.tsv", [("film", 1.5), ("story", "much")])
    answer = command("finetune", "small", "--data", "scores.tsv", "--target", "score", "--out", "s")
    assert answer.status == 2
    assert answer.err.splitlines()[-1].endswith("scores.tsv: line 3: 'much' is no number")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "which model, and on what? qkv finetune MODEL --data train.tsv --eval dev.tsv"),
        (["small", "--data", "train.tsv", "--freeze", "x"], "--freeze x: it is a number of layers, or all"),
        (["small", "--data", "none.tsv"], "none.tsv: there is no such file or folder"),
        (["--resume", "small"], "small: holds no finetune.toml, so it is no fine-tuning to go on with"),
        (["--resume", "run", "--out", "x"], "--out means nothing with --resume: a run goes on as it was"),
        (["--resume", "run", "--seeds", "3"], "--seeds means nothing with --resume: a run goes on as it was"),
        (["a.toml", "--seeds", "3"], "--seeds means nothing with a recipe; its settings are changed so: epochs=2"),
        (["a.toml", "--eval", "dev.tsv"], "--eval means nothing with a recipe; its settings are changed so: epochs=2"),
        (["small", "./small", "--data", "train.tsv"], "small and ./small would both have the folder runs/1/small"),
        (["small", "--data", "train.tsv", "--rows", "98"], "98 rows were asked for, and there are 88"),
        (["small", "--data", "train.tsv", "--from-scratch", "--lora", "2"], "none of them may be frozen"),
    ],
)
def test_bad_options_are_refused_in_one_line(command, folder, arguments, line):
    answer = command("finetune", *arguments)
    assert (answer.status, answer.out) == (2, "")
    assert line in answer.err.splitlines()[-1]
    assert not (folder / "runs").exists()


def test_a_model_that_cannot_be_loaded_leaves_no_folder(command, folder):
    (folder / "pickled").mkdir()
    (folder / "pickled" / "config.json").write_bytes((folder / "small" / "config.json").read_bytes())
    (folder / "pickled" / "pytorch_model.bin").touch()
    answer = command("finetune", "pickled", "--data", "train.tsv", "--out", "never")
    assert "pickled weights can run code when opened, so they are not" in answer.err
    assert not (folder / "never").exists()


def test_changed_data_are_not_gone_on_with(command, folder):
    rows = write_tsv(folder / "changing.tsv", reviews(40))
    assert command("finetune", "small", "--data", "changing.tsv", "--out", "changed", *QUICK).status == 0
    write_tsv(rows, reviews(41))
    answer = command("finetune", "--resume", "changed")
    assert answer.status == 2
    assert answer.err.endswith("changing.tsv: is gone or was changed since changed was begun\n")
