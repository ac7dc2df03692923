"""How every lesson looks on the terminal: sections, remarks and tables, in at most 90 columns of plain text.

Each of them ends with an empty line, so they can follow one another in any order.
"""

import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from math import isinf, isnan

from jaxtyping import Float, Int
from torch import Tensor

WIDTH = 90

Cell = str | int | float


def print_section(title: str) -> None:
    print(f"{title}\n{'-' * _width(title)}\n")


def print_text(text: str) -> None:
    """A remark, wrapped; the newlines of the source do not matter."""
    print(textwrap.fill(" ".join(text.split()), WIDTH), end="\n\n")


def print_slide_error(text: str) -> None:
    """Where the slide says something else than the computation, or leaves something out."""
    print_text(f"The slide slips: {text}")


def print_table(header: Sequence[str], rows: Iterable[Sequence[Cell]], *, digits: int = 4) -> None:
    """Words to the left, numbers to the right; floats with `digits` decimals, whole numbers by thousands."""
    rows = [list(row) for row in rows]
    words = [all(isinstance(row[column], str) for row in rows) for column in range(len(header))]
    shown = [list(header), *([_shown(cell, digits) for cell in row] for row in rows)]
    widths = [max(_width(row[column]) for row in shown) for column in range(len(header))]
    rule = ["-" * width for width in widths]
    for row in [shown[0], rule, *shown[1:]]:
        cells = [
            cell + " " * (width - _width(cell)) if is_word else cell.rjust(width)
            for cell, width, is_word in zip(row, widths, words, strict=True)
        ]
        print("  " + "  ".join(cells).rstrip())
    print()


def print_matrix(
    values: Float[Tensor, "row column"] | Int[Tensor, "row column"],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    corner: str = "",
    digits: int = 2,
) -> None:
    """A labelled matrix; `corner` says what its numbers are."""
    print_table([corner, *columns], [[label, *row] for label, row in zip(rows, values.tolist(), strict=True)], digits=digits)


def format_shape(part: Tensor) -> str:
    """A tensor's shape as the lectures write it: 5×16."""
    return "×".join(f"{size:,}" for size in part.shape)


def max_abs_difference(one: Tensor, other: Tensor) -> str:
    """The largest, of any two numbers that stand at the same place."""
    return f"{(one - other).abs().max().item():.1e}"


def _width(text: str) -> int:
    """Columns on the terminal: the bar of T̄ takes none."""
    return sum(not unicodedata.combining(character) for character in text)


def _shown(cell: Cell, digits: int) -> str:
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int):
        return f"{cell:,}"
    if isnan(cell):
        return "NaN"
    if isinf(cell):
        return "−∞" if cell < 0 else "∞"
    # An exact 0, such as a masked weight, must not look like a small number rounded.
    return "0" if cell == 0.0 else f"{cell:z.{digits}f}"
