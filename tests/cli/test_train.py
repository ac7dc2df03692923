"""`qkv train`: recipes, own texts, resuming, profiles and errors."""

import errno
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from qkv.cli.training_run import RunOptions, _fit_and_write_final_recipe
from qkv.text import save_tokenizer
from qkv.training import RunFolder, Trainer, open_run, prepare_run, profiler
from qkv.training.distributed import SingleProcess
from qkv.training.objectives import LossOutput
from qkv.training.profiler import DeviceRates
from qkv.training.recipe_selection import TimeBudgetReplanner, steps_in_budget
from tests.cli.answers import assert_error
from tests.data.stores import tokenizer
from tests.failing_disk import failing_disk
from tests.training.runs import recipe, write_text


@pytest.fixture
def command(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QKV_DATA", raising=False)
    return command


@pytest.fixture
def recipe_file(tmp_path) -> Path:
    write_text(tmp_path / "text.txt")
    (tmp_path / "a.toml").write_text(recipe(steps=4, eval_every=2, save_every=2).to_toml())
    return tmp_path / "a.toml"


def test_a_recipe_is_trained_and_resumed(command, recipe_file, tmp_path):
    answer = command("train", recipe_file, "training.seed=3", "--data", tmp_path, "--out", "run", "--device", "cpu")
    assert answer.status == 0
    assert answer.out.startswith("run: 4 steps, 176 tokens, ")
    assert "best validation loss" in answer.out
    assert "step 2: validation loss" in answer.err
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "seed = 3" in (tmp_path / "run" / "recipe.toml").read_text()
    again = command("train", "--resume", "run", "--device", "cpu")
    assert again.status == 0
    assert re.search(r"\b4 steps .*training.steps .*run/recipe.toml", again.err)


def test_a_profile_is_printed_and_does_not_change_the_run(command, recipe_file, tmp_path, monkeypatch):
    fast = DeviceRates(matmul_flops=1e18, bandwidth=1e18)  # no step can be faster than this bound
    monkeypatch.setattr(profiler, "measure_device_rates", lambda _device, _dtype: fast)

    def train(name, *flags):
        answer = command("train", recipe_file, "--data", tmp_path, "--out", name, "--device", "cpu", *flags)
        assert answer.status == 0
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return answer.err, [json.loads(line).get("loss") for line in lines]

    messages, losses = train("profiled", "--profile")
    assert "optimizer" in messages
    assert "OF BOUND" in messages
    messages, losses_without = train("plain")
    assert "OF BOUND" not in messages
    assert losses == losses_without


def test_a_gpt_is_trained_on_a_text_without_a_recipe(command, tmp_path):
    write_text(tmp_path / "book.txt")
    answer = command("train", "gpt", "--text", "book.txt", "--steps", 2, "--device", "cpu")
    assert answer.status == 0
    assert answer.out.startswith("runs/1: 2 steps")
    assert RunFolder(tmp_path / "runs" / "1").checkpoint_steps() == [1, 2]
    more = command("train", "gpt", "--text", "book.txt", "--steps", 1, "--init-from", "runs/1", "--device", "cpu")
    assert more.out.startswith("runs/2: 1 steps")
    assert "init_from" in (tmp_path / "runs" / "2" / "recipe.toml").read_text()


def test_minutes_determine_the_number_of_steps(command, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "train_and_measure_step_seconds", lambda _trainer: 0.05)
    monkeypatch.setattr(TimeBudgetReplanner, "replan", lambda *_: None)
    write_text(tmp_path / "book.txt")
    answer = command("train", "gpt", "--text", "book.txt", "--minutes", 0.05, "--out", "run", "--device", "cpu")
    assert answer.status == 0
    assert not (tmp_path / "run" / "preparing.json").exists()
    # Three seconds at 0.05 s per step.
    assert open_run(tmp_path / "run").recipe.training.steps == steps_in_budget(60.0, n_evaluations=11) > 20


def test_a_dry_run_creates_no_files(command, recipe_file, tmp_path):
    answer = command("train", recipe_file, "--dry-run", "--device", "cpu")
    assert answer.status == 0
    assert "parameters" in answer.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.toml", "text.txt"]
    with_budget = command("train", recipe_file, "--dry-run", "--minutes", 1, "--device", "cpu")
    assert re.search(r"\b4 steps\b.*--minutes", with_budget.err)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", ["no text"]),
        (b"\x7fELF\0\0", ["byte 4", "NUL"]),
        (b"caf\xe9 au lait", ["line 1: ", "byte 3 (0xE9)"]),
    ],
)
def test_an_invalid_text_file_is_rejected(command, tmp_path, content, parts):
    (tmp_path / "book.txt").write_bytes(content)
    answer = command("train", "gpt", "--text", "book.txt", "--steps", 2, "--out", "run", "--device", "cpu")
    assert_error(answer, f"{tmp_path}/book.txt: ", *parts)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["twenty bytes of text", "x"])
def test_twenty_characters_are_sufficient_and_one_is_not(command, tmp_path, text):
    (tmp_path / "book.txt").write_text(text)
    answer = command("train", "gpt", "--text", "book.txt", "--steps", 2, "--out", "run", "--device", "cpu")
    if len(text) > 1:
        assert answer.status == 0
    else:
        assert_error(answer, f"{tmp_path}/book.txt: ", "2 tokens", "5%")


@pytest.mark.parametrize(
    ("n_sentences", "batch_size", "numbers"),
    [(5, 7, ["116", "4", "77", "13", "500"]), (200, 7, None), (200, 131, ["4,796", "4", "1,441"])],
)
def test_a_small_text_is_reported_once(command, recipe_file, tmp_path, n_sentences, batch_size, numbers):
    write_text(tmp_path / "text.txt", n_sentences)
    size = f"batch_size={batch_size}"
    options = [f"training.{size}", f"training.micro_{size}", "--out", "run", "--device", "cpu"]
    answer = command("train", recipe_file, *options)
    assert answer.status == 0
    warnings = [line for line in answer.err.splitlines() if " batches " in line]
    assert [re.findall(r"[\d,]*\d", line) for line in warnings] == ([] if numbers is None else [numbers])


def test_a_long_line_is_supported(command, tmp_path):
    (tmp_path / "book.txt").write_text("all on one line, " * (1_500_000 // 17))
    answer = command("train", "gpt", "--text", "book.txt", "--steps", 1, "--out", "run", "--device", "cpu")
    assert answer.status == 0


def test_a_missing_text_is_reported(command):
    assert_error(command("train", "gpt", "--text", "nowhere", "--steps", 2), "nowhere: ")


def test_missing_data_of_a_recipe_is_reported(command, recipe_file):
    answer = command("train", recipe_file, "--data", "nowhere", "--out", "run")
    assert_error(answer, "nowhere/text.txt: ")


def test_an_output_folder_that_is_not_empty_is_rejected(command, recipe_file, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").touch()
    assert_error(command("train", recipe_file, "--out", "run"), "run: ", "mine.txt", "--out", "qkv train --resume run")


def test_a_read_only_file_system_is_reported(command, recipe_file):
    with failing_disk(1, errno.EROFS):
        answer = command("train", recipe_file, "--out", "run")
    assert_error(answer, "run: ", "Read-only file system", "bytes free", status=1)


def test_a_full_disk_is_reported(command, recipe_file, monkeypatch):
    save = RunFolder.save

    def save_on_a_full_disk(run, progress, **files):
        with failing_disk(9 if progress.step == 4 else None):
            save(run, progress, **files)

    monkeypatch.setattr(RunFolder, "save", save_on_a_full_disk)
    answer = command("train", recipe_file, "--out", "run", "--device", "cpu")
    assert_error(answer, "run/checkpoints/step-00000004: ", " bytes", "No space left on device", status=1)
    monkeypatch.undo()


def test_a_misspelled_key_is_reported_with_a_suggestion(command, recipe_file):
    assert_error(
        command("train", recipe_file, "training.stepz=3"), f"{recipe_file}: ", "training", "'stepz'", "'steps'"
    )


def test_a_tokenizer_with_another_vocabulary_size_is_rejected(command, recipe_file, tmp_path):
    save_tokenizer(tokenizer(), tmp_path / "words")
    options = ["tokenizer.path=words/tokenizer.json", "tokenizer.vocab_size=100", "--out", "run"]
    assert_error(
        command("train", recipe_file, *options, "--device", "cpu"),
        "tokenizer.vocab_size ",
        "got 100",
        "words/tokenizer.json",
        "277",
    )


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["gpt2", "--text", "a"], ["'gpt2'", "gpt, bert, translate", ".toml"]),
        (
            [],
            ["qkv train gpt --text FILE", "qkv train translate --pairs FILE", "RECIPE.toml", "qkv train --resume RUN"],
        ),
        (["gpt"], ["qkv train gpt --text FILE"]),
        (["bert"], ["qkv train bert --text FILE"]),
        (["translate"], ["qkv train translate --pairs FILE.tsv"]),
        (["gpt", "--text", "a", "--steps", "1", "--minutes", "1"], ["--minutes", "--steps"]),
        (["--resume", "run", "--steps", "1"], ["--steps ", "--resume", "run/recipe.toml", "--init-from run"]),
        (["--resume", "run", "--dry-run"], ["--dry-run ", "--resume", "run/recipe.toml", "--init-from run"]),
        (["gpt", "--text", "a", "--rnn"], ["--rnn ", "gpt"]),
        (["gpt", "--pairs", "a.tsv"], ["--pairs ", "gpt"]),
        (["translate", "--pairs", "a.tsv", "--no-next-sentence"], ["--next-sentence/--no-next-sentence", "translate"]),
        (["bert", "--text", "a", "--data", "texts"], ["--data ", "bert"]),
        (["--resume", "nowhere"], ["nowhere: "]),
        (["--resume", "."], [".: ", "recipe.toml"]),
        (["gpt", "--text", "a", "--device", "tpu"], ["--device tpu: ", "cpu, cuda, auto"]),
        (["gpt", "--text", "a", "--resume-if-exists"], ["--resume-if-exists", "--out"]),
        (["nowhere.toml"], ["nowhere.toml: ", "No such file or directory"]),
    ],
)
def test_invalid_arguments_are_rejected(command, arguments, parts):
    assert_error(command("train", *arguments), *parts)


@pytest.mark.parametrize("option", [("--steps", 1), ("--pairs", "a.tsv"), ("--rnn",)])
def test_options_without_an_effect_on_a_recipe_are_rejected(command, recipe_file, option):
    assert_error(command("train", recipe_file, *option), f"{option[0]} ", "recipe", "training.steps=200")


def test_a_backend_for_another_device_is_rejected_before_the_data_is_prepared(
    command, recipe_file, tmp_path, monkeypatch
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    answer = command("train", recipe_file, "--out", "run", "--device", "cpu", "--backend", "cuda")
    assert_error(answer, "--backend cuda: PyTorch finds no NVIDIA GPU on this machine")
    assert not (tmp_path / "run").exists()


def test_a_non_finite_loss_has_exit_status_1(command, recipe_file, monkeypatch):
    from qkv.training.step import EagerStep

    original = EagerStep.micro_batch_losses
    nan = float("nan")

    def nan_losses(*arguments):
        return ((LossOutput(output.loss * nan), counts) for output, counts in original(*arguments))

    monkeypatch.setattr(EagerStep, "micro_batch_losses", nan_losses)
    assert_error(command("train", recipe_file, "--out", "run", "--device", "cpu"), "step 0", "nan", status=1)


def test_an_interrupted_preparation_can_be_resumed(command, recipe_file, tmp_path, monkeypatch):
    import qkv.training.gpt

    monkeypatch.setattr(qkv.training.gpt, "prepare_store", lambda *_args, **_kwargs: os.kill(os.getpid(), 15))
    answer = command("train", recipe_file, "--out", "run", "--device", "cpu")
    assert answer.status == 143
    assert re.fullmatch(r"qkv: .*SIGTERM.*: qkv train --resume run\n", answer.err)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    answer = command("train", "--resume", "run", "--device", "cpu")
    assert answer.status == 0
    assert answer.err.startswith("qkv: run: ")
    assert answer.out.startswith("run: 4 steps")


def test_a_preparation_resumed_by_more_processes_saves_their_micro_batch_size(recipe_file, tmp_path):
    class FourProcesses(SingleProcess):
        world_size = 4

    original = recipe(steps=4)
    ready = prepare_run(original, tmp_path / "run", tmp_path, progress=lambda _label: lambda _done, _all: None)
    prepared = _fit_and_write_final_recipe(ready, torch.device("cpu"), FourProcesses(), RunOptions(), seconds=None)
    assert (original.training.micro_batch_size, prepared.recipe.training.micro_batch_size) == (2, 1)
    assert open_run(tmp_path / "run").recipe == prepared.recipe


def test_a_missing_tensorboard_is_reported_before_the_run_starts(command, recipe_file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert_error(command("train", recipe_file, "--out", "run", "--tensorboard"), "pip install tensorboard")
    assert not (tmp_path / "run").exists()
