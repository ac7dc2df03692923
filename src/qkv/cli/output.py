"""Status messages, progress bars, tables and profiles in the terminal.

Standard output contains only results. Status messages, progress bars and profiles are written to standard error, and
progress bars are drawn only if it is a terminal.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.training.profiler import Profile

Item = TypeVar("Item")


TERMINAL_WIDTH = 100
"""Maximum number of characters per line in wrapped text."""
ProfileOption = Annotated[
    bool,
    typer.Option(
        "--profile", help="Print the time spent in each category of operations, and compare it with the roofline bound."
    ),
]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.json",
        help="Write a Chrome trace of all operator calls, which can be opened at ui.perfetto.dev. Implies --profile.",
    ),
]
FASTER_THAN_BOUND = "—"
_FASTER_THAN_BOUND_NOTE = (
    f"{FASTER_THAN_BOUND}: faster than the bound, which assumes that all data is read from main memory. Some of the "
    "data was read from a cache, or some of the work is counted under matrix products (such as the attention of a "
    "single token)."
)


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


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, n_left_aligned: int = 1) -> list[str]:
    """Format a header and rows as aligned lines.

    The first `n_left_aligned` columns are left-aligned (text); all other columns are right-aligned (numbers).
    """
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if i < n_left_aligned else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    ]


def check_trace_path(path: Path) -> None:
    """Check that the `--trace` path is valid before any work is done."""
    if path.suffix != ".json":
        raise InputError(f"--trace {path}: file name must end in .json")
    if not path.parent.is_dir():
        raise InputError(f"--trace {path}: folder not found: {path.parent}")


def print_backend(selected: str, reasons: Mapping[str, str]) -> None:
    """Print which backend ran, and for each faster one the reason why it did not."""
    others = "".join(f"; {name} is not used: {reason}" for name, reason in reasons.items())
    print_status(f"backend: {selected}{others}")


def print_profile(profile: "Profile", workload: str, *, no_bound_reason: str = "") -> None:
    """Print the time for each category and the roofline bound as a percentage of this time.

    `workload` describes what was profiled, such as "one step of 4,096 tokens". `no_bound_reason` is printed if the
    bound is unknown.
    """
    from qkv.cost.estimate import format_bytes, format_flops

    lines = [f"{workload}: {1000 * profile.seconds:,.1f} ms"]
    if (bound := profile.bound) is not None and (rates := profile.rates) is not None:
        flops, bandwidth = format_flops(rates.matmul_flops), format_bytes(int(rates.bandwidth))
        measured_rates = f"{flops}/s and {bandwidth}/s, as measured on this device"
        if bound <= profile.seconds:
            lines[0] += f", {_format_percent(bound / profile.seconds)} of the bound"
        note = " (the run was faster)" if bound > profile.seconds else ""
        lines.append(f"bound: {1000 * bound:,.1f} ms at {measured_rates}{note}")
    elif no_bound_reason:
        lines.append(f"BOUND MS and OF BOUND are empty: {no_bound_reason}")
    rows = []
    for category, seconds in sorted(profile.seconds_by_category.items(), key=lambda item: -item[1]):
        bound = profile.bounds.get(category)
        if seconds / profile.seconds < 0.0005 and not bound:
            continue
        of_bound = ""
        if bound and seconds:
            of_bound = _format_percent(bound / seconds) if bound <= seconds else FASTER_THAN_BOUND
        bound_ms = "" if bound is None else f"{1000 * bound:,.2f}"
        share = _format_percent(seconds / profile.seconds)
        rows.append((category.value, f"{1000 * seconds:,.2f}", share, bound_ms, of_bound))
    lines += format_table(("CATEGORY", "MS", "SHARE", "BOUND MS", "OF BOUND"), rows)
    if any(row[-1] == FASTER_THAN_BOUND for row in rows):
        lines.append(_FASTER_THAN_BOUND_NOTE)
    print("\n".join(lines), file=sys.stderr)


def _format_percent(fraction: float) -> str:
    return f"{fraction:.0%}".replace("%", " %") if fraction >= 0.0995 else f"{fraction:.1%}".replace("%", " %")
