"""`qkv finetune`: the table of scores, the model, resuming and errors."""

import json
import os
import re
import signal

import pytest

import qkv
from qkv.training import finetune as finetuning
from tests.cli.answers import assert_error, assert_only_error
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


def test_several_models_and_seeds_are_compared_in_one_table(command, folder):
    data = ("--data", "train.tsv", "--eval", "dev.tsv", "--out", "comparison", "--seeds", 2)
    answer = command("finetune", "small", "wide", *data, *QUICK)
    assert answer.status == 0, answer.err
    header, *rows = answer.out.splitlines()
    assert re.split(r"  +", header) == ["model", "parameters", "accuracy", "f1 of good", "f1 macro", "mcc", "seconds"]
    assert [row.split()[0] for row in rows] == ["small", "wide"]
    assert all(row.count("±") == 4 for row in rows)
    assert re.search(r"qkv: wide: .*classifier.weight, classifier.bias", answer.err)
    assert "qkv: wide, seed 1: step 7 of 7: " in answer.err
    assert not re.search(r"\b31 .*\b30\b", answer.err)
    assert (folder / "comparison" / "wide" / "seed-1" / "confusion.png").read_bytes().startswith(b"\x89PNG")


def test_few_evaluation_rows_are_reported_once(command):
    answer = command("finetune", "small", "wide", "--data", "train.tsv", "--out", "few", "--max-train-rows", 60, *QUICK)
    assert len(re.findall(r"train.tsv: .*\b9\b.*\b30\b", answer.err)) == 1


def test_a_run_is_a_classifier(command, folder):
    answer = command(
        "finetune", "small", "--data", "train.tsv", "--out", "run", "--json", "--max-train-rows", 60, *QUICK
    )
    assert answer.status == 0, answer.err
    record = json.loads(answer.out)
    assert record["best"] == "run"
    assert (record["runs"][0]["n_train"], record["runs"][0]["n_evaluation"]) == (60, 9)
    results = qkv.load(folder / "run").classify(["it was great", "the dull film"])
    assert {result.labels[0] for result in results} <= {"good", "bad"}


def test_early_stopping_is_reported(command):
    data = ("--data", "train.tsv", "--eval", "dev.tsv", "--out", "early", "--json", "--device", "cpu")
    # With a learning rate of nearly 0, no evaluation is better than the first.
    slow = ("--epochs", 10, "--batch-size", 16, "--learning-rate", 1e-12, "--patience", 2)
    answer = command("finetune", "small", *data, *slow)
    (run,) = json.loads(answer.out)["runs"]
    assert (run["steps"], run["planned_steps"], run["best_step"]) == (21, 70, 7)
    assert re.search(r"97 rows, .*3\.0 of 10 epochs.*step 7 \(--patience\)", answer.err)


def test_an_interrupted_run_is_resumed(command, monkeypatch):
    class Stopping(finetuning.Trainer):
        def _log_entry(self, entry):
            super()._log_entry(entry)
            if entry["step"] == 3 and "loss" in entry:
                os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(finetuning, "Trainer", Stopping)
        answer = command("finetune", "small", "--data", "train.tsv", "--out", "cut", *QUICK)
    assert (answer.status, answer.out) == (130, "")
    assert re.fullmatch(r"qkv: .*SIGINT.*: qkv finetune --resume cut", answer.err.splitlines()[-1])
    again = command("finetune", "--resume", "cut", "--device", "cpu")
    assert (again.status, len(again.out.splitlines())) == (0, 2)
    assert "step 1 of" not in again.err


def test_the_files_of_a_recipe_are_in_the_data_folder(command, folder):
    (folder / "a.toml").write_text('models = ["small"]\ntrain = "train.tsv"\nevaluation = "dev.tsv"\nbatch_size = 16\n')
    answer = command("finetune", "a.toml", "epochs=1", "--data", folder, "--out", "by-recipe", "--device", "cpu")
    assert answer.status == 0, answer.err
    assert "small: 97 rows, 1 epoch, learning rate" in answer.err


def test_finetuning_in_python_takes_a_few_lines(folder, monkeypatch):
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
TOO_LONG = ("context_length", "23", "1 of 2", "--truncate")


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("text\ttag\na\tx\n", ["bad.tsv: ", "'label'", "text, tag", "--label-column"]),
        ("text\tlabel\na\tx\nb\tx\n", ["bad.tsv: ", "'x'", "2"]),
        ("text\tlabel\na\tx\n\nb\ty\n", ["bad.tsv: line 3"]),
        (b"text\tlabel\na\tx\n\xff\ty\n", ["bad.tsv: line 3: ", "byte 15 (0xFF)"]),
        (
            "text\tlabel\na\tx\nb\ty\n",
            ["dev.tsv: line 2", "'bad'", "x, y"],
        ),
        (
            f"text\tlabel\nfilm\tbad\n{LONG}\tgood\n",
            ["bad.tsv: line 3", "32 tokens", *TOO_LONG],
        ),
        (
            "text\tlabel\nfilm\tbad\n" + "film " * 200_000 + "\tgood\n",
            ["bad.tsv: line 3", "200,002 tokens", *TOO_LONG],
        ),
    ],
)
def test_invalid_rows_are_reported_in_one_line(command, folder, content, parts):
    (folder / "bad.tsv").write_bytes(content.encode() if isinstance(content, str) else content)
    answer = command(
        "finetune", "small", "--data", "bad.tsv", "--eval", "dev.tsv", "--out", f"o{hash(str(parts))}", *QUICK
    )
    assert_error(answer, *parts)


def test_an_unsuitable_model_is_rejected_before_anything_else_is_reported(command, folder):
    write_tsv(folder / "few.tsv", reviews(7))
    answer = command("finetune", "stories", "--data", "few.tsv", "--eval", "few.tsv", "--out", "refused", *QUICK)
    assert_only_error(answer, "stories: ", "GPT", "BERT")
    assert not (folder / "refused").exists()


def test_a_score_must_be_a_number(command, folder):
    write_tsv(folder / "scores.tsv", [("film", 1.5), ("story", "much")])
    answer = command("finetune", "small", "--data", "scores.tsv", "--problem-type", "regression", "--out", "s")
    assert_error(answer, "scores.tsv: line 3", "'much'")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["qkv finetune MODEL --data train.tsv --eval dev.tsv"]),
        (["small", "--data", "train.tsv", "--freeze", "x"], ["--freeze x: ", "all"]),
        (["small", "--data", "none.tsv"], ["none.tsv: "]),
        (["--resume", "small"], ["small: ", "finetune.toml"]),
        (["--resume", "run", "--out", "x"], ["--out ", "--resume"]),
        (["--resume", "run", "--seeds", "3"], ["--seeds ", "--resume"]),
        (["a.toml", "--seeds", "3"], ["--seeds ", "epochs=2"]),
        (["a.toml", "--eval", "dev.tsv"], ["--eval ", "epochs=2"]),
        (["small", "./small", "--data", "train.tsv"], ["small and ./small", "runs/1/small"]),
        (["small", "--data", "train.tsv", "--max-train-rows", "98"], ["98", "88"]),
        (["small", "--data", "train.tsv", "--from-scratch", "--lora-rank", "2"], ["from_scratch", "lora_rank"]),
    ],
)
def test_invalid_options_are_reported_in_one_line(command, folder, arguments, parts):
    assert_error(command("finetune", *arguments), *parts)
    assert not (folder / "runs").exists()


def test_a_model_that_cannot_be_loaded_leaves_no_folder(command, folder):
    (folder / "pickled").mkdir()
    (folder / "pickled" / "config.json").write_bytes((folder / "small" / "config.json").read_bytes())
    (folder / "pickled" / "pytorch_model.bin").touch()
    answer = command("finetune", "pickled", "--data", "train.tsv", "--out", "never")
    assert_error(answer, "pickled")
    assert not (folder / "never").exists()


def test_a_run_with_changed_data_cannot_be_resumed(command, folder):
    rows = write_tsv(folder / "changing.tsv", reviews(40))
    assert command("finetune", "small", "--data", "changing.tsv", "--out", "changed", *QUICK).status == 0
    write_tsv(rows, reviews(41))
    assert_error(command("finetune", "--resume", "changed"), "changing.tsv: ", "changed")
