"""Print the section titles, paragraphs and tables of lessons.

Paragraphs are wrapped at 90 columns. Every printing function ends its output with an empty line, so calls can follow
each other in any order.
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
    """Print an underlined section title."""
    print(f"{title}\n{'-' * _display_width(title)}\n")


def print_text(text: str) -> None:
    """Print a paragraph and wrap its lines. Line breaks in `text` are ignored."""
    print(textwrap.fill(" ".join(text.split()), WIDTH, break_on_hyphens=False), end="\n\n")


def print_slide_error(text: str) -> None:
    """Print a note about an error or omission on a lecture slide."""
    print_text(f"Error on the slide: {text}")


def print_table(header: Sequence[str], rows: Iterable[Sequence[Cell]], *, digits: int = 4) -> None:
    """Print a table with left-aligned text and right-aligned numbers. Floats are printed with `digits` decimals."""
    rows = [list(row) for row in rows]
    is_text = [all(isinstance(row[column], str) for row in rows) for column in range(len(header))]
    lines = [list(header), *([_format_cell(cell, digits) for cell in row] for row in rows)]
    widths = [max(_display_width(row[column]) for row in lines) for column in range(len(header))]
    rule = ["-" * width for width in widths]
    for row in [lines[0], rule, *lines[1:]]:
        cells = [
            cell + " " * (width - _display_width(cell)) if is_left_aligned else cell.rjust(width)
            for cell, width, is_left_aligned in zip(row, widths, is_text, strict=True)
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
    """Print a matrix with row and column labels. The text `corner` is printed in the top left cell."""
    print_table(
        [corner, *columns], [[label, *row] for label, row in zip(rows, values.tolist(), strict=True)], digits=digits
    )


def format_shape(tensor: Tensor) -> str:
    """Format the shape of a tensor in the notation of the lectures, for example 5×16."""
    return "×".join(f"{size:,}" for size in tensor.shape)


def max_abs_difference(left: Tensor, right: Tensor) -> str:
    """Format the largest absolute difference between two tensors."""
    return f"{(left - right).abs().max().item():.1e}"


def _display_width(text: str) -> int:
    """Return the number of terminal columns that a text occupies.

    Combining characters, such as the bar of T̄, have no width.
    """
    return sum(not unicodedata.combining(character) for character in text)


def _format_cell(cell: Cell, digits: int) -> str:
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int):
        return f"{cell:,}"
    if isnan(cell):
        return "NaN"
    if isinf(cell):
        return "−∞" if cell < 0 else "∞"
    # An exact 0, such as a masked weight, is printed without decimals, unlike a small number that rounds to 0.
    return "0" if cell == 0.0 else f"{cell:z.{digits}f}"
