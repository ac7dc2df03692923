"""SIGINT and SIGTERM in any phase of the command: a checkpoint where there is one to make, and the right exit code."""

import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.faults.families import FAMILIES, write_data
from tests.training.processes import command, run_to_end, start
from tests.training.runs import checkpoints, curve

ARGUMENTS = ["train", "a.toml", "--data", ".", "--out", "run", "--device", "cpu"]
RESUME = ["train", "--resume", "run", "--device", "cpu"]
BEFORE_THE_LOOP = ("tokenizer", "store")
IN_THE_LOOP = ("training", "evaluation", "save")
PATIENCE = 240.0
"""Seconds; a guard against a hang only."""


def slowly(place: str, folder: str, arguments: list[str]) -> None:
    """Run the command; in this place it creates `there` and waits for `go`, and creates `noted` after a signal."""
    from qkv.training import bert, pair_preparation, text_preparation, trainer, translation

    def waiting(function):
        def wait(*given, **named):
            (Path(folder) / "there").touch()
            until = time.monotonic() + PATIENCE
            while time.monotonic() < until and not (Path(folder) / "go").exists():
                if (
                    signal.getsignal(signal.SIGINT) is signal.SIG_DFL
                ):  # the handler leaves the next signal to the system
                    (Path(folder) / "noted").touch()
                time.sleep(0.01)
            return function(*given, **named)

        return wait

    places = {
        "tokenizer": [(text_preparation, "train_tokenizer"), (pair_preparation, "train_tokenizer")],
        "store": [(text_preparation, "prepare_store"), (bert, "prepare_sentences"), (translation, "encode_pairs")],
        "training": [(trainer.Trainer, "_gradients")],
        "evaluation": [(trainer, "evaluate")],
        "save": [(trainer.RunFolder, "save")],
    }
    if place == "compilation":
        from torch._inductor import compile_fx

        places[place] = [(compile_fx, "compile_fx")]
    for owner, name in places[place]:
        setattr(owner, name, waiting(getattr(owner, name)))
    command(folder, arguments)


def arrive(folder: Path, place: str):
    process = start(slowly, place, str(folder), ARGUMENTS)
    wait_for(folder / "there", process)
    return process


def wait_for(file: Path, process) -> None:
    until = time.monotonic() + PATIENCE
    while not file.exists():
        assert process.is_alive(), (file.parent / "err").read_text()
        assert time.monotonic() < until
        time.sleep(0.01)


def stop(folder: Path, place: str, number: signal.Signals) -> str:
    """The command, stopped there; what it said."""
    process = arrive(folder, place)
    os.kill(process.pid, number)
    (folder / "go").touch()
    process.join(PATIENCE)
    assert process.exitcode == 128 + number
    said = (folder / "err").read_text()
    assert "Traceback" not in said
    line = re.search(rf"^qkv: stopped by {number.name}(?: at step (\d+))?; go on: qkv train --resume run$", said, re.M)
    assert line, said
    assert (line[1] is None) == (place in BEFORE_THE_LOOP), said
    if line[1] is not None:
        assert max(path.name for path in (folder / "run" / "checkpoints").iterdir()) == f"step-{int(line[1]):08d}"
    return said


def is_resumed(folder: Path, unbroken) -> bool:
    assert run_to_end(command, str(folder), RESUME) == 0, (folder / "err").read_text()
    if unbroken.prepared.recipe.family == "bert":
        # WordPiece is not trained twice alike, so its run is compared with one on the data that it made itself.
        shutil.copytree(folder / "run", folder / "again", ignore=shutil.ignore_patterns("checkpoints", "metrics.jsonl"))
        assert run_to_end(command, str(folder), ["train", "--resume", "again", "--device", "cpu"]) == 0
        assert len(curve(folder / "run")) == len(unbroken.curve)
        return curve(folder / "run") == curve(folder / "again")
    return curve(folder / "run") == unbroken.curve and checkpoints(folder / "run") == unbroken.checkpoints


@pytest.mark.parametrize(
    ("family", "place", "number"),
    [
        ("gpt", "save", signal.SIGTERM),
        ("bert", "store", signal.SIGINT),
        ("seq2seq", "tokenizer", signal.SIGTERM),
        ("rnn", "evaluation", signal.SIGINT),
    ],
)
def test_the_first_signal_saves_and_leaves_and_the_run_goes_on(tmp_path, unbroken_of, family, place, number):
    write_data(tmp_path, family)
    stop(tmp_path, place, number)
    assert is_resumed(tmp_path, unbroken_of(family))


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_either_signal_in_any_phase_saves_and_leaves(tmp_path, unbroken_of, family, tally):
    for place in (*BEFORE_THE_LOOP, *IN_THE_LOOP):
        for number in (signal.SIGINT, signal.SIGTERM):
            folder = write_data(tmp_path / f"{place}-{number}", family)
            stop(folder, place, number)
            tally.add(f"{number.name} in {place}", survived=is_resumed(folder, unbroken_of(family)))


@pytest.mark.long
@pytest.mark.parametrize("family", ["gpt", "bert", "seq2seq"])  # an rnn is never compiled
def test_a_signal_while_the_model_is_compiled_saves_after_that_step(tmp_path, family, tally):
    for number in (signal.SIGINT, signal.SIGTERM):
        folder = write_data(tmp_path / number.name, family, compile=True)
        said = stop(folder, "compilation", number)
        tally.add(f"{number.name} while compiling", survived=" at step 1;" in said)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_leaves_at_once(tmp_path, number):
    process = arrive(write_data(tmp_path, "gpt"), "training")
    os.kill(process.pid, number)
    wait_for(tmp_path / "noted", process)
    os.kill(process.pid, number)
    process.join(PATIENCE / 2)  # it would wait for `go` twice as long
    assert process.exitcode == -number  # which a shell calls 128 more
