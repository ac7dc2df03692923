"""SIGINT and SIGTERM in any phase of the command save a checkpoint if training has started, and set the exit code."""

import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.faults.families import FAMILIES, write_data
from tests.training.processes import run_command, run_process, start_process
from tests.training.runs import checkpoint_contents, logged_metrics

ARGUMENTS = ["train", "a.toml", "--data", ".", "--out", "run", "--device", "cpu"]
RESUME = ["train", "--resume", "run", "--device", "cpu"]
BEFORE_THE_LOOP = ("tokenizer", "store")
IN_THE_LOOP = ("training", "evaluation", "save")
TIMEOUT = 240.0
"""Timeout in seconds, only a guard against hangs."""


def run_with_pause(phase: str, folder: str, arguments: list[str]) -> None:
    """Run the command. In this phase it creates `reached` and waits for `continue`.

    It creates `signaled` when it has received a signal.
    """
    from qkv.training import bert, gpt, loop, step, translation

    def with_pause(function):
        def wait(*arguments, **keywords):
            (Path(folder) / "reached").touch()
            deadline = time.monotonic() + TIMEOUT
            while time.monotonic() < deadline and not (Path(folder) / "continue").exists():
                if (
                    signal.getsignal(signal.SIGINT) is signal.SIG_DFL
                ):  # the handler of the first signal restores the default
                    (Path(folder) / "signaled").touch()
                time.sleep(0.01)
            return function(*arguments, **keywords)

        return wait

    functions = {
        "tokenizer": [(gpt, "train_tokenizer"), (translation, "train_tokenizer")],
        "store": [
            (gpt, "prepare_store"),
            (bert, "prepare_sentence_store"),
            (translation, "tokenize_and_delete_pair_texts"),
        ],
        "training": [(step.EagerStep, "compute_gradients")],
        "evaluation": [(loop, "evaluate")],
        "save": [(loop.RunFolder, "save")],
    }
    if phase == "compilation":
        from torch._inductor import compile_fx

        functions[phase] = [(compile_fx, "compile_fx")]
    for target, name in functions[phase]:
        setattr(target, name, with_pause(getattr(target, name)))
    run_command(folder, arguments)


def start_and_wait(folder: Path, phase: str):
    process = start_process(run_with_pause, phase, str(folder), ARGUMENTS)
    wait_for(folder / "reached", process)
    return process


def wait_for(file: Path, process) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not file.exists():
        assert process.is_alive(), (file.parent / "err").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stop_in_phase(folder: Path, phase: str, number: signal.Signals) -> str:
    """Send a signal to the command in this phase and return its stderr."""
    process = start_and_wait(folder, phase)
    os.kill(process.pid, number)
    (folder / "continue").touch()
    process.join(TIMEOUT)
    assert process.exitcode == 128 + number
    stderr = (folder / "err").read_text()
    assert "Traceback" not in stderr
    line = re.search(rf"^qkv: stopped by {number.name}(?: at step (\d+))?\b.*qkv train --resume run$", stderr, re.M)
    assert line, stderr
    assert (line[1] is None) == (phase in BEFORE_THE_LOOP), stderr
    if line[1] is not None:
        assert max(path.name for path in (folder / "run" / "checkpoints").iterdir()) == f"step-{int(line[1]):08d}"
    return stderr


def resumes_identically(folder: Path, uninterrupted) -> bool:
    assert run_process(run_command, str(folder), RESUME) == 0, (folder / "err").read_text()
    if uninterrupted.prepared.recipe.family == "bert":
        # WordPiece training is not deterministic, so the run is compared with a second run on its own data.
        shutil.copytree(
            folder / "run", folder / "repeated", ignore=shutil.ignore_patterns("checkpoints", "metrics.jsonl")
        )
        assert run_process(run_command, str(folder), ["train", "--resume", "repeated", "--device", "cpu"]) == 0
        assert len(logged_metrics(folder / "run")) == len(uninterrupted.logged_metrics)
        return logged_metrics(folder / "run") == logged_metrics(folder / "repeated")
    return (
        logged_metrics(folder / "run") == uninterrupted.logged_metrics
        and checkpoint_contents(folder / "run") == uninterrupted.checkpoint_contents
    )


@pytest.mark.parametrize(
    ("family", "phase", "number"),
    [
        ("gpt", "save", signal.SIGTERM),
        ("bert", "store", signal.SIGINT),
        ("seq2seq", "tokenizer", signal.SIGTERM),
        ("rnn", "evaluation", signal.SIGINT),
    ],
)
def test_the_first_signal_saves_and_exits_and_the_run_can_be_resumed(tmp_path, unbroken_run_of, family, phase, number):
    write_data(tmp_path, family)
    stop_in_phase(tmp_path, phase, number)
    assert resumes_identically(tmp_path, unbroken_run_of(family))


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_either_signal_in_any_phase_saves_and_exits(tmp_path, unbroken_run_of, family, tally):
    for phase in (*BEFORE_THE_LOOP, *IN_THE_LOOP):
        for number in (signal.SIGINT, signal.SIGTERM):
            folder = write_data(tmp_path / f"{phase}-{number}", family)
            stop_in_phase(folder, phase, number)
            tally.add(f"{number.name} in {phase}", survived=resumes_identically(folder, unbroken_run_of(family)))


@pytest.mark.long
@pytest.mark.parametrize("family", ["gpt", "bert", "seq2seq"])  # RNNs do not support compile
def test_a_signal_during_compilation_saves_after_the_step(tmp_path, family, tally):
    for number in (signal.SIGINT, signal.SIGTERM):
        folder = write_data(tmp_path / number.name, family, compile=True)
        stderr = stop_in_phase(folder, "compilation", number)
        tally.add(f"{number.name} while compiling", survived=" at step 1" in stderr)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_exits_immediately(tmp_path, number):
    process = start_and_wait(write_data(tmp_path, "gpt"), "training")
    os.kill(process.pid, number)
    wait_for(tmp_path / "signaled", process)
    os.kill(process.pid, number)
    process.join(TIMEOUT / 2)  # without the signal it would wait twice as long
    assert process.exitcode == -number  # killed by the default handler
