"""The examples from the lectures, one short module each.

Each lesson is a module with a public function `lesson(seed)`. This function prints tables with `console` and returns
another function, which draws the figure (`figure_style.DrawFigure`). A lesson therefore runs without matplotlib, and
the figure shows the numbers that were just computed. `run` prints the title and the lectures of a lesson, seeds
PyTorch's random number generator and limits PyTorch to one thread.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from qkv.errors import InputError
from qkv.lessons.catalog import LECTURES, LESSONS, LessonInfo
from qkv.lessons.figure_style import DrawFigure

__all__ = ["LECTURES", "LESSONS", "LessonInfo", "run"]


def run(name: str, *, plot: Path | None = None, seed: int = 0) -> DrawFigure:
    """Print a lesson, save its figure if a path is given as `plot`, and return a function that draws the figure.

    The output depends only on the seed, except for measured times. In a notebook, call `draw = run("walkthrough")` and
    then `draw()` to display the figure.
    """
    if name not in LESSONS:
        from qkv.config.base import did_you_mean_suffix

        hint = did_you_mean_suffix(name, list(LESSONS)) or "; run `qkv lesson` to list all lessons"
        raise InputError(f"unknown lesson '{name}'{hint}")
    if plot is not None:
        from qkv.inspection.figures import check_figure_path

        check_figure_path(plot)
    import torch

    info = LESSONS[name]
    lesson = import_module(f"qkv.lessons.{info.module}").lesson
    _print_title_and_lectures(info)
    with _single_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draw = lesson(seed)
    if plot is not None:
        _save_lesson_figure(draw, plot)
    return draw


@contextmanager
def _single_thread() -> Iterator[None]:
    """Compute with one thread.

    The matrices of lessons are so small that a second thread would slow down the computation, especially on a busy
    machine.
    """
    import torch

    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


def _print_title_and_lectures(info: LessonInfo) -> None:
    print(f"\n{info.title}\n{'=' * len(info.title)}")
    for letter in info.lectures:
        print(f"Lecture {letter}: {LECTURES[letter]}")
    print()


def _save_lesson_figure(draw: DrawFigure, plot: Path) -> None:
    from qkv.inspection.figures import save_figure

    save_figure(draw(), plot)
    print(f"qkv: saved figure to {plot}", file=sys.stderr)
