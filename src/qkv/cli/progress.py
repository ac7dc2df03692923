"""Progress on standard error: drawn on a terminal, silent in a pipe."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

T = TypeVar("T")


def say(line: str) -> None:
    """A remark beside the results."""
    print(f"qkv: {line}", file=sys.stderr)


@contextmanager
def bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that is moved by calling it with (done, all)."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def bars() -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """Gives a new bar for each label, and takes the one before away."""
    with ExitStack() as stack:

        def next_bar(label: str) -> Callable[[int, int], None]:
            stack.close()
            return stack.enter_context(bar(label))

        yield next_bar


def counted(items: Iterable[T], label: str) -> Iterator[T]:
    """The same items, counted as they go by."""
    with bar(label) as move:
        for i, item in enumerate(items, 1):
            yield item
            move(i, 0)
