"""`qkv train`: from a text to a model in one command; bad input in one line."""

import errno
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from qkv.cli.training_run import _made_ready
from qkv.text import save_tokenizer
from qkv.training import RunFolder, Trainer, open_run, prepare_run, profiler
from qkv.training.distributed import SingleProcess
from qkv.training.objectives import LossOutput
from qkv.training.profiler import DeviceRates
from qkv.training.recipe_selection import steps_in_budget
from qkv.training.time_budget import TimeBudget
from tests.data.stores import tokenizer
from tests.disks import refusing
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


AS_IT_WAS = (
    "means nothing with --resume: a run goes on as it was; for more steps raise training.steps in run/recipe.toml, or "
    "begin another run with its weights: --from run"
)


def refused(answer, line, status=2):
    """One line, this one, and no traceback."""
    assert (answer.status, answer.out) == (status, "")
    assert answer.err.splitlines()[-1] == f"qkv: error: {line}"
    assert "Traceback" not in answer.err


def test_a_recipe_is_followed_and_can_be_gone_on_with(command, recipe_file, tmp_path):
    answer = command("train", recipe_file, "training.seed=3", "--data", tmp_path, "--out", "run", "--device", "cpu")
    assert answer.status == 0
    assert answer.out.startswith("run: 4 steps, 176 tokens, ")
    assert "best validation loss" in answer.out
    assert "step 2: validation loss" in answer.err
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "seed = 3" in (tmp_path / "run" / "recipe.toml").read_text()
    again = command("train", "--resume", "run", "--device", "cpu")
    assert again.status == 0
    assert "all 4 steps are done; for more raise training.steps in run/recipe.toml and resume" in again.err


def test_a_profile_is_told_and_the_run_is_the_same_as_without(command, recipe_file, tmp_path, monkeypatch):
    fast = DeviceRates(matmul_flops=1e18, bandwidth=1e18)  # so that no step is faster than its bound
    monkeypatch.setattr(profiler, "measure_device_rates", lambda _device, _dtype: fast)

    def trained(name, *flags):
        answer = command("train", recipe_file, "--data", tmp_path, "--out", name, "--device", "cpu", *flags)
        assert answer.status == 0
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return answer.err, [json.loads(line).get("loss") for line in lines]

    told, losses = trained("one", "--profile")
    assert "optimizer" in told
    assert "of the bound reached" in told
    silent, losses_without = trained("two")
    assert "of the bound reached" not in silent
    assert losses == losses_without


def test_own_text_needs_no_recipe(command, tmp_path):
    write_text(tmp_path / "book.txt")
    answer = command("train", "gpt", "--text", "book.txt", "--steps", 2, "--device", "cpu")
    assert answer.status == 0
    assert answer.out.startswith("runs/1: 2 steps")
    assert RunFolder(tmp_path / "runs" / "1").checkpoint_steps() == [1, 2]
    more = command("train", "gpt", "--text", "book.txt", "--steps", 1, "--from", "runs/1", "--device", "cpu")
    assert more.out.startswith("runs/2: 1 steps")
    assert "init_from" in (tmp_path / "runs" / "2" / "recipe.toml").read_text()


def test_minutes_set_the_steps(command, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "measure_seconds_per_step", lambda _trainer: 0.05)
    monkeypatch.setattr(TimeBudget, "plan", lambda *_: None)
    write_text(tmp_path / "book.txt")
    answer = command("train", "gpt", "--text", "book.txt", "--minutes", 0.05, "--out", "run", "--device", "cpu")
    assert answer.status == 0
    assert not (tmp_path / "run" / "preparing.json").exists()
    # Three seconds of 0.05 s a step.
    assert open_run(tmp_path / "run").recipe.training.steps == steps_in_budget(60.0, n_evaluations=11) > 20


def test_a_dry_run_makes_nothing(command, recipe_file, tmp_path):
    answer = command("train", recipe_file, "--dry-run", "--device", "cpu")
    assert answer.status == 0
    assert "parameters" in answer.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.toml", "text.txt"]
    timed = command("train", recipe_file, "--dry-run", "--minutes", 1, "--device", "cpu")
    assert "these are the recipe's 4 steps: a run times how many fit in --minutes" in timed.err


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "is empty: it holds no text"),
        (b"\x7fELF\0\0", "byte 4 is NUL: this is a binary file, not text"),
        (b"caf\xe9 au lait", "line 1: byte 3 (0xE9) is not UTF-8"),
    ],
)
def test_text_that_is_none_is_refused(command, tmp_path, content, line):
    (tmp_path / "book.txt").write_bytes(content)
    answer = command("train", "gpt", "--text", "book.txt", "--steps", 2, "--out", "run", "--device", "cpu")
    refused(answer, f"{tmp_path}/book.txt: {line}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["twenty bytes of text", "x"])
def test_a_few_letters_are_trained_on_all_the_same_or_refused(command, tmp_path, text):
    (tmp_path / "book.txt").write_text(text)
    answer = command("train", "gpt", "--text", "book.txt", "--steps", 2, "--out", "run", "--device", "cpu")
    if len(text) > 1:
        assert answer.status == 0
    else:
        refused(answer, f"{tmp_path}/book.txt: 2 tokens are too few to keep 5% of them apart")


@pytest.mark.parametrize(
    ("n_sentences", "batch_size", "said"),
    [
        (5, 7, ("116 tokens are less than 4 batches of 77: the model will soon know them by heart; "
                "13 held out are below 500: the validation loss will say little")),
        (200, 7, ""),
        (200, 131, "4,796 tokens are less than 4 batches of 1,441: the model will soon know them by heart"),
    ],
)  # fmt: skip
def test_too_little_text_is_remarked_on_once(command, recipe_file, tmp_path, n_sentences, batch_size, said):
    write_text(tmp_path / "text.txt", n_sentences)
    size = f"batch_size={batch_size}"
    options = [f"training.{size}", f"training.micro_{size}", "--out", "run", "--device", "cpu"]
    answer = command("train", recipe_file, *options)
    assert answer.status == 0
    assert [line for line in answer.err.splitlines() if "less than" in line or "below" in line] == (
        [f"qkv: {said}"] if said else []
    )


def test_one_long_line_is_read(command, tmp_path):
    (tmp_path / "book.txt").write_text("all on one line, " * (1_500_000 // 17))
    answer = command("train", "gpt", "--text", "book.txt", "--steps", 1, "--out", "run", "--device", "cpu")
    assert answer.status == 0


def test_a_missing_text_is_refused(command):
    refused(command("train", "gpt", "--text", "nowhere", "--steps", 2), "nowhere: there is no such file or folder")


def test_missing_data_of_a_recipe_is_refused(command, recipe_file):
    answer = command("train", recipe_file, "--data", "nowhere", "--out", "run")
    refused(answer, "nowhere/text.txt: there is no such file or folder")


def test_a_folder_that_is_not_empty_is_refused(command, recipe_file, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").touch()
    refused(
        command("train", recipe_file, "--out", "run"),
        "run: is not empty (it holds mine.txt); give another --out, or go on: qkv train --resume run",
    )


def test_a_folder_that_cannot_be_written_is_refused(command, recipe_file):
    with refusing(1, errno.EROFS):
        answer = command("train", recipe_file, "--out", "run")
    assert answer.status == 1
    assert answer.err.startswith("qkv: error: run: cannot be written: Read-only file system (")
    assert answer.err.endswith(" bytes free)\n")


def test_a_full_disk_is_said_with_the_bytes_and_the_run_goes_on_later(command, recipe_file, monkeypatch):
    save = RunFolder.save

    def save_on_a_full_disk(run, progress, **what):
        with refusing(9 if progress.step == 4 else None):
            save(run, progress, **what)

    monkeypatch.setattr(RunFolder, "save", save_on_a_full_disk)
    answer = command("train", recipe_file, "--out", "run", "--device", "cpu")
    assert answer.status == 1
    line = answer.err.splitlines()[-1]
    assert line.startswith("qkv: error: run/checkpoints/step-00000004: cannot write ")
    assert "bytes: No space left on device (" in line
    monkeypatch.undo()


def test_a_misspelt_key_is_refused_with_the_right_one(command, recipe_file):
    refused(
        command("train", recipe_file, "training.stepz=3"),
        f"{recipe_file}: training: unknown key 'stepz'; did you mean 'steps'?",
    )


def test_a_tokenizer_that_does_not_fit_is_refused_with_both_numbers(command, recipe_file, tmp_path):
    save_tokenizer(tokenizer(), tmp_path / "words")
    options = ["tokenizer.path=words/tokenizer.json", "tokenizer.vocab_size=100", "--out", "run"]
    refused(
        command("train", recipe_file, *options, "--device", "cpu"),
        "tokenizer.vocab_size=100, but words/tokenizer.json has 277",
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["gpt2", "--text", "a"],
         ("'gpt2' is neither `gpt` or `bert`, to train on --text, nor `translate`, on --pairs, "
          "nor a recipe (a file that ends in .toml)")),
        ([], ("what to train? `qkv train gpt --text FILE` (or bert), `qkv train translate --pairs FILE`, "
              "`qkv train RECIPE.toml`, or `qkv train --resume RUN`")),
        (["gpt"], "no text was given: qkv train gpt --text FILE"),
        (["bert"], "no text was given: qkv train bert --text FILE"),
        (["translate"], "no pairs were given: qkv train translate --pairs FILE.tsv"),
        (["gpt", "--text", "a", "--steps", "1", "--minutes", "1"], "--minutes and --steps were both given; choose one"),
        (["--resume", "run", "--steps", "1"], f"--steps {AS_IT_WAS}"),
        (["--resume", "run", "--dry-run"], f"--dry-run {AS_IT_WAS}"),
        (["gpt", "--text", "a", "--rnn"], "--rnn means nothing with gpt"),
        (["gpt", "--pairs", "a.tsv"], "--pairs means nothing with gpt"),
        (["translate", "--pairs", "a.tsv", "--no-next-sentence"],
         "--next-sentence/--no-next-sentence means nothing with translate"),
        (["bert", "--text", "a", "--data", "texts"], "--data means nothing with bert"),
        (["--resume", "nowhere"], "nowhere: there is no such run"),
        (["--resume", "."], ".: holds no recipe.toml, so it is no run to go on with"),
        (["gpt", "--text", "a", "--device", "tpu"], "--device tpu: it is cpu, cuda or auto"),
        (["nowhere.toml"], "nowhere.toml: cannot be read: No such file or directory"),
    ],
)  # fmt: skip
def test_arguments_that_make_no_sense_are_refused(command, arguments, line):
    refused(command("train", *arguments), line)


@pytest.mark.parametrize("option", [("--steps", 1), ("--pairs", "a.tsv"), ("--rnn",)])
def test_an_option_that_a_recipe_would_pass_over_is_refused(command, recipe_file, option):
    reason = "means nothing with a recipe; its settings are changed so: training.steps=200"
    refused(command("train", recipe_file, *option), f"{option[0]} {reason}")


def test_numbers_that_are_none_end_with_status_1(command, recipe_file, monkeypatch):
    from qkv.training import Trainer

    outcomes = Trainer._outcomes
    nan = float("nan")

    def spoilt(*given):
        return ((LossOutput(one.loss * nan), counts) for one, counts in outcomes(*given))

    monkeypatch.setattr(Trainer, "_outcomes", spoilt)
    refused(
        command("train", recipe_file, "--out", "run", "--device", "cpu"),
        "step 0: loss nan: the loss is not a finite number; no update was made, there is no checkpoint yet",
        status=1,
    )


def test_a_killed_preparation_goes_on(command, recipe_file, tmp_path, monkeypatch):
    import qkv.training.run_preparation

    monkeypatch.setattr(qkv.training.text_preparation, "prepare_store", lambda *_given, **_named: os.kill(os.getpid(), 15))
    answer = command("train", recipe_file, "--out", "run", "--device", "cpu")
    assert answer.status == 143
    assert answer.err == "qkv: stopped by SIGTERM; go on: qkv train --resume run\n"
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    answer = command("train", "--resume", "run", "--device", "cpu")
    assert answer.status == 0
    assert "qkv: run: the preparation was not finished; going on with it\n" in answer.err
    assert answer.out.startswith("run: 4 steps")


def test_a_preparation_that_more_processes_take_up_has_the_parts_they_train_with_in_its_recipe(recipe_file, tmp_path):
    class Four(SingleProcess):
        world = 4

    told = recipe(steps=4)
    ready = prepare_run(told, tmp_path / "run", tmp_path, progress=lambda _label: lambda _done, _all: None)
    made = _made_ready(ready, torch.device("cpu"), Four(), seconds=None)
    assert (told.training.micro_batch_size, made.recipe.training.micro_batch_size) == (2, 1)
    assert open_run(tmp_path / "run").recipe == made.recipe


def test_tensorboard_is_missed_before_the_run_begins(command, recipe_file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    refused(
        command("train", recipe_file, "--out", "run", "--tensorboard"),
        "TensorBoard's files need the package tensorboard; install it with: pip install tensorboard",
    )
    assert not (tmp_path / "run").exists()
