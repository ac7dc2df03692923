"""Status messages and progress bars on standard error.

Progress bars are drawn only if standard error is a terminal.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

Item = TypeVar("Item")


def print_status(message: str) -> None:
    """Print a one-line message to standard error, prefixed with `qkv:`."""
    print(f"qkv: {message}", file=sys.stderr)


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar and yield a function that takes the completed and total counts and updates the bar."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(label, total=None)
        yield lambda completed, total: progress.update(task, completed=completed, total=total)


@contextmanager
def sequential_progress_bars() -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """Yield a function that starts a progress bar with the given label and removes the previous bar."""
    with ExitStack() as stack:

        def start_bar(label: str) -> Callable[[int, int], None]:
            stack.close()
            return stack.enter_context(progress_bar(label))

        yield start_bar


def track_progress(items: Iterable[Item], label: str) -> Iterator[Item]:
    """Yield the items unchanged while showing how many have been processed."""
    with progress_bar(label) as update:
        for i, item in enumerate(items, 1):
            yield item
            update(i, 0)
