"""The `qkv` command: standard output, standard error and exit status."""

import re
import sys
from types import SimpleNamespace

import pytest

import qkv
from qkv.cli import main
from qkv.errors import InputError

INFO = SimpleNamespace(name="soft", title="A soft dict", lectures=("C", "E"), mission_rows=("1.1",), module="soft")


@pytest.fixture
def runs(monkeypatch):
    """Replace the lessons by a fake module and record which lessons are run."""
    calls = []

    def run(name, *, plot, seed):
        if name == "stopped":
            raise KeyboardInterrupt
        if name not in lessons.LESSONS:
            raise InputError(f"unknown lesson {name!r}")
        calls.append((name, plot, seed))

    lessons = SimpleNamespace(LESSONS={"soft": INFO}, run=run)
    monkeypatch.setitem(sys.modules, "qkv.lessons", lessons)
    monkeypatch.setattr(qkv, "lessons", lessons, raising=False)
    return calls


@pytest.fixture
def command(monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["qkv", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        return SimpleNamespace(status=stop.value.code, **capsys.readouterr()._asdict())

    return call


def test_plot_and_seed_are_passed_to_the_lesson(command, runs, tmp_path):
    assert command("lesson", "soft", "--plot", tmp_path / "a.png", "--seed", 7).status == 0
    assert runs == [("soft", tmp_path / "a.png", 7)]


def test_lessons_are_listed_without_a_name(command, runs):
    answer = command("lesson")
    assert answer.out.splitlines() == ["NAME  LECTURES  ROWS  TITLE", "soft  C E       1.1   A soft dict"]
    assert not runs


def test_all_runs_every_lesson_and_prints_times_to_standard_error(command, runs):
    answer = command("lesson", "--all")
    assert runs == [("soft", None, 0)]
    assert answer.out == ""
    assert re.search(r"^qkv: soft: \d+\.\d s$", answer.err, re.MULTILINE)


def test_an_error_is_one_line_with_exit_status_2(command, runs):
    answer = command("lesson", "sotf")
    assert (answer.status, answer.out, answer.err) == (2, "", "qkv: error: unknown lesson 'sotf'\n")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--plot", "a.png"], ["--plot"]),
        (["--all", "--plot", "a.png"], ["--plot"]),
        (["soft", "--all"], ["--all", "'soft'"]),
    ],
)
def test_contradictory_arguments_are_rejected_before_anything_runs(command, runs, arguments, parts):
    answer = command("lesson", *arguments)
    assert answer.status == 2
    assert all(part in answer.err for part in parts)
    assert not runs


@pytest.mark.parametrize("arguments", [["frob"], ["lesson", "--frob"], ["lesson", "soft", "--seed", "x"]])
def test_unknown_commands_and_options_have_exit_status_2(command, runs, arguments):
    answer = command(*arguments)
    assert answer.status == 2
    assert "Traceback" not in answer.err


def test_ctrl_c_has_exit_status_130(command, runs):
    assert command("lesson", "stopped").status == 130


def test_version(command):
    assert command("--version").out == f"qkv {qkv.__version__}\n"
