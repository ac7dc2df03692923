"""`qkv lesson`: list the lectures' examples, or run one."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from qkv.cli.text_tables import table
from qkv.errors import InputError


def lesson(
    name: Annotated[str | None, typer.Argument(help="The lesson to run; none lists them all.")] = None,
    *,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", dir_okay=False, help="Save the lesson's picture here.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Where the lesson's chance starts.")] = 0,
    run_all: Annotated[bool, typer.Option("--all", help="Run every lesson; times go to standard error.")] = False,
) -> None:
    """List the lectures' examples, or run one.

    \b
    Examples:
      qkv lesson
      qkv lesson soft-dictionary
      qkv lesson toy-head-7 --seed 3 --plot head.png
    """
    from qkv import lessons

    if plot is not None and (name is None or run_all):
        raise InputError("--plot saves the picture of one lesson: name it, as in qkv lesson walkthrough --plot a.png")
    if run_all:
        if name is not None:
            raise InputError(f"--all runs every lesson: leave out {name!r}, or leave out --all")
        _run_all(seed)
    elif name is None:
        _list()
    else:
        lessons.run(name, plot=plot, seed=seed)


def _list() -> None:
    from qkv.lessons import LESSONS

    rows = [(info.name, " ".join(info.lectures), " ".join(info.rows), info.title) for info in LESSONS.values()]
    print("\n".join(table(["NAME", "LECTURES", "ROWS", "TITLE"], rows, left=4)))


def _run_all(seed: int) -> None:
    from qkv import lessons

    started = time.perf_counter()
    for name in lessons.LESSONS:
        before = time.perf_counter()
        lessons.run(name, plot=None, seed=seed)
        print(f"qkv: {name}: {time.perf_counter() - before:.1f} s", file=sys.stderr)
    print(f"qkv: all {len(lessons.LESSONS)} lessons: {time.perf_counter() - started:.1f} s", file=sys.stderr)
