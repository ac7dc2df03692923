"""SIGINT and SIGTERM in any phase of the command: a checkpoint where there is one to make, and the right exit code."""

import os
import signal
import time
from pathlib import Path

import pytest

from qkv.training.signals import Stopped, stop_at_once, stop_requests
from tests.training.processes import command, run_to_end, start
from tests.training.runs import checkpoints, curve, recipe, write_text


def test_inside_the_loop_a_signal_is_noted():
    before = signal.getsignal(signal.SIGTERM)
    with stop_requests() as stop:
        assert stop.signal is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal is signal.SIGTERM
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL  # so that a second one leaves at once
    assert signal.getsignal(signal.SIGTERM) is before


def test_elsewhere_a_signal_stops_at_once():
    with pytest.raises(Stopped, match="SIGINT"), stop_at_once():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def slowly(place: str, folder: str, arguments: list[str]) -> None:
    """The command, which says when it comes to this place and then waits there for a signal."""
    from qkv.training import texts, trainer

    def waiting(function):
        def wait(*given, **named):
            (Path(folder) / "there").touch()
            until = time.monotonic() + 20
            while time.monotonic() < until and not (Path(folder) / "go").exists():
                time.sleep(0.01)
            return function(*given, **named)

        return wait

    owner, name = {
        "tokenizer": (texts, "train_tokenizer"),
        "store": (texts, "prepare_store"),
        "first step": (trainer.Trainer, "_gradients"),
        "evaluation": (trainer, "evaluate"),
        "save": (trainer.RunFolder, "save"),
    }[place]
    setattr(owner, name, waiting(getattr(owner, name)))
    command(folder, arguments)


@pytest.fixture
def folder(tmp_path):
    write_text(tmp_path / "text.txt")
    (tmp_path / "a.toml").write_text(recipe().as_toml())
    return tmp_path


def arguments():
    return ["train", "a.toml", "--data", ".", "--out", "run", "--device", "cpu"]


def arrive(folder, place):
    process = start(slowly, place, str(folder), arguments())
    until = time.monotonic() + 60
    while not (folder / "there").exists():
        assert process.is_alive(), (folder / "err").read_text()
        assert time.monotonic() < until
        time.sleep(0.01)
    return process


@pytest.mark.parametrize(
    ("place", "number", "step"),
    [
        ("tokenizer", signal.SIGTERM, None),
        ("store", signal.SIGINT, None),
        ("first step", signal.SIGTERM, 1),
        ("evaluation", signal.SIGINT, 5),
        ("save", signal.SIGTERM, 3),
    ],
)
def test_the_first_signal_saves_and_leaves_and_the_run_goes_on(folder, place, number, step, trained):
    process = arrive(folder, place)
    os.kill(process.pid, number)
    (folder / "go").touch()
    process.join(60)
    assert process.exitcode == 128 + number
    at = "" if step is None else f" at step {step}"
    said = (folder / "err").read_text()
    assert f"qkv: stopped by {number.name}{at}; go on: qkv train --resume run\n" in said
    assert "Traceback" not in said
    if step is not None:
        assert max(path.name for path in (folder / "run" / "checkpoints").iterdir()) == f"step-{step:08d}"
    assert run_to_end(command, str(folder), ["train", "--resume", "run", "--device", "cpu"]) == 0
    assert len(curve(folder / "run")) == len(curve(trained.run.path))
    assert checkpoints(folder / "run").keys() == checkpoints(trained.run.path).keys()


def test_a_second_signal_leaves_at_once(folder):
    process = arrive(folder, "first step")
    os.kill(process.pid, signal.SIGTERM)
    time.sleep(0.2)
    assert process.is_alive()
    os.kill(process.pid, signal.SIGTERM)
    started = time.monotonic()
    process.join(10)
    assert time.monotonic() - started < 5
    assert process.exitcode == -signal.SIGTERM  # which a shell calls 143
