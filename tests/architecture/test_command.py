"""The `qkv` command: what goes where, and with which exit status."""

import re
import sys
from types import SimpleNamespace

import pytest

import qkv
from qkv.cli import main
from qkv.errors import InputError

INFO = SimpleNamespace(name="soft", title="A soft dict", lectures=("C", "E"), rows=("1.1",), module="soft")


@pytest.fixture
def ran(monkeypatch):
    """Stands in for the lessons; holds what was run."""
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


def test_a_lesson_gets_its_plot_and_seed(command, ran, tmp_path):
    assert command("lesson", "soft", "--plot", tmp_path / "a.png", "--seed", 7).status == 0
    assert ran == [("soft", tmp_path / "a.png", 7)]


def test_no_name_lists_the_lessons(command, ran):
    answer = command("lesson")
    assert answer.out.splitlines() == ["NAME  LECTURES  ROWS  TITLE", "soft  C E       1.1   A soft dict"]
    assert not ran


def test_all_runs_every_lesson_and_times_it_on_standard_error(command, ran):
    answer = command("lesson", "--all")
    assert ran == [("soft", None, 0)]
    assert answer.out == ""
    assert re.search(r"^qkv: soft: \d+\.\d s$", answer.err, re.MULTILINE)


def test_a_mistake_of_the_caller_is_one_line_and_status_2(command, ran):
    answer = command("lesson", "sotf")
    assert (answer.status, answer.out, answer.err) == (2, "", "qkv: error: unknown lesson 'sotf'\n")


@pytest.mark.parametrize(
    ("arguments", "remark"),
    [
        (["--plot", "a.png"], "--plot saves the picture of one lesson"),
        (["--all", "--plot", "a.png"], "--plot saves the picture of one lesson"),
        (["soft", "--all"], "leave out 'soft'"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused_before_anything_runs(command, ran, arguments, remark):
    answer = command("lesson", *arguments)
    assert answer.status == 2
    assert remark in answer.err
    assert not ran


@pytest.mark.parametrize("arguments", [["frob"], ["lesson", "--frob"], ["lesson", "soft", "--seed", "x"]])
def test_unknown_words_are_status_2(command, ran, arguments):
    answer = command(*arguments)
    assert answer.status == 2
    assert "Traceback" not in answer.err


def test_ctrl_c_is_status_130(command, ran):
    assert command("lesson", "stopped").status == 130


def test_version(command):
    assert command("--version").out == f"qkv {qkv.__version__}\n"
