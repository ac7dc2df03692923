"""The `qkv lesson` command."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from qkv.cli.output import format_table
from qkv.errors import InputError


def lesson(
    name: Annotated[str | None, typer.Argument(help="Lesson to run. By default, all lessons are listed.")] = None,
    *,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", dir_okay=False, help="Save the lesson's figure to this file.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    run_all: Annotated[
        bool, typer.Option("--all", help="Run all lessons, and print their run times to standard error.")
    ] = False,
) -> None:
    """List the examples from the lectures, or run one of them.

    \b
    Examples:
      qkv lesson
      qkv lesson soft-dictionary
      qkv lesson toy-head-7 --seed 3 --plot head.png
    """
    from qkv import lessons

    if plot is not None and (name is None or run_all):
        raise InputError("--plot requires the name of one lesson, for example: qkv lesson walkthrough --plot a.png")
    if run_all:
        if name is not None:
            raise InputError(f"--all cannot be combined with the name of a lesson, got {name!r}")
        _run_all_lessons(seed)
    elif name is None:
        _list_lessons()
    else:
        lessons.run(name, plot=plot, seed=seed)


def _list_lessons() -> None:
    from qkv.lessons import LESSONS

    rows = [(info.name, " ".join(info.lectures), " ".join(info.mission_rows), info.title) for info in LESSONS.values()]
    print("\n".join(format_table(["NAME", "LECTURES", "ROWS", "TITLE"], rows, n_left_aligned=4)))


def _run_all_lessons(seed: int) -> None:
    from qkv import lessons

    started = time.perf_counter()
    for name in lessons.LESSONS:
        before = time.perf_counter()
        lessons.run(name, plot=None, seed=seed)
        print(f"qkv: {name}: {time.perf_counter() - before:.1f} s", file=sys.stderr)
    print(f"qkv: all {len(lessons.LESSONS)} lessons: {time.perf_counter() - started:.1f} s", file=sys.stderr)
