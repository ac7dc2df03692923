"""Plain-text tables for terminal output."""

from collections.abc import Sequence

TERMINAL_WIDTH = 100
"""Maximum number of characters per line in wrapped text."""


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
