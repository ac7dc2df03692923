"""The lectures' examples, one short file each.

A lesson is a module with one public function, `lesson(seed)`: it prints its tables (with `printing`) and
returns a function that draws its picture (`drawing.Draw`). So a lesson runs without matplotlib, and draws
what it has just computed. `run` prints the title and the lectures before it, starts torch's own chance
at the seed, and gives it one core.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from qkv.errors import InputError
from qkv.lessons.catalog import LECTURES, LESSONS, LessonInfo

__all__ = ["LECTURES", "LESSONS", "LessonInfo", "run"]


def run(name: str, *, plot: Path | None = None, seed: int = 0) -> Callable[[], Any]:
    """Print the lesson; save its picture where `plot` says. The same seed prints the same numbers, times aside.

    In a notebook: `draw = run("walkthrough")`, and `draw()` shows the picture of what was computed.
    """
    if name not in LESSONS:
        from qkv.config.base import suggest_closest

        hint = suggest_closest(name, list(LESSONS)) or "; `qkv lesson` lists them"
        raise InputError(f"there is no lesson '{name}' among the {len(LESSONS)}{hint}")
    if plot is not None:
        from qkv.inspection.figures import check_figure_path

        check_figure_path(plot)
    import torch

    info = LESSONS[name]
    lesson = import_module(f"qkv.lessons.{info.module}").lesson
    _print_title(info)
    n_threads = torch.get_num_threads()
    # For matrices as small as these a second thread costs more than it brings, much more on a busy machine.
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            draw = lesson(seed)
    finally:
        torch.set_num_threads(n_threads)
    if plot is not None:
        _save(draw, plot)
    return draw


def _print_title(info: LessonInfo) -> None:
    print(f"\n{info.title}\n{'=' * len(info.title)}")
    for letter in info.lectures:
        print(f"Lecture {letter}: {LECTURES[letter]}")
    print()


def _save(draw: Callable[[], Any], plot: Path) -> None:
    from qkv.inspection.figures import save_figure

    save_figure(draw(), plot)
    print(f"qkv: picture saved in {plot}", file=sys.stderr)
