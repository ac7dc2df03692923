"""The texts a command works on: its arguments, or standard input line by line; many at a time, answered in order.

A blank line in is a blank line out, in every command that answers line by line: nothing is made up for it, and what
follows stays beside its own line. `generate` alone takes an empty prompt for a prompt.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from qkv.cli.progress import say
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.tasks import EncodedText, TextEncoder
    from qkv.tasks.text_encoder import TextOrPair

A = TypeVar("A")

LINES_AT_ONCE = 2048
"""Sorted by length and computed together; all of a large input would fill the memory."""


def given_texts(texts: list[str] | None) -> Iterator[str]:
    """An empty line is an empty text, so that answers and lines stay side by side."""
    yield from texts or read_lines_of("-")


def read_lines_of(path: str) -> Iterator[str]:
    """Without their ends; `-` is standard input, compressed files are opened."""
    from qkv.data.documents import read_lines
    from qkv.data.text_sources import STANDARD_INPUT, find_single_file, open_source

    name = "standard input" if path == STANDARD_INPUT else path
    empty = True
    with open_source(find_single_file(path)) as (_, stream):
        for line in read_lines(name, stream):
            empty = False
            yield line.rstrip("\r\n")
    if empty:
        raise InputError(f"{name} is empty, and no text was given" if path == STANDARD_INPUT else f"{name}: is empty")


def pairs_where_tabs(texts: Iterable[str]) -> "Iterator[TextOrPair]":
    """Two columns are a pair."""
    for number, text in enumerate(texts, start=1):
        columns = text.split("\t")
        if len(columns) > 2:
            raise InputError(f"text {number} has {len(columns)} columns; a pair has 2, with one tab between")
        yield (columns[0], columns[1]) if len(columns) == 2 else text


def in_a_line(text: str) -> str:
    """As it is printed: one line of answer for each text, whatever the text holds."""
    return text.replace("\r", "\\r").replace("\n", "\\n")


def is_blank(text: "TextOrPair | tuple[str, ...]") -> bool:
    """Of a pair: both are."""
    return not "".join(text).strip()


def answered(
    read: "Iterable[list[EncodedText]]", answer: "Callable[[list[EncodedText]], Sequence[A]]",
    *, asks: "Callable[[EncodedText], bool]" = lambda one: not is_blank(one.texts),
) -> "Iterator[tuple[EncodedText, A | None]]":  # fmt: skip
    """Each text with its answer, in order; None for one that asks nothing, as a blank one does."""
    for some in read:
        asking = [asks(one) for one in some]
        found = iter(answer([one for one, asked in zip(some, asking, strict=True) if asked]) if any(asking) else ())
        for one, asked in zip(some, asking, strict=True):
            yield one, next(found) if asked else None


def encoded(
    task: "TextEncoder", texts: "Iterable[TextOrPair]", *, truncate: bool, max_tokens: int | None = None,
    parse_special_tokens: bool = False,
) -> "Iterator[list[EncodedText]]":  # fmt: skip
    """All texts, some thousand at a time; at the end it is said how many were cut."""
    waiting, done, n_cut = iter(texts), 0, 0
    while some := list(islice(waiting, LINES_AT_ONCE)):
        read = task.encode(
            some, truncate=truncate, max_tokens=max_tokens, parse_special_tokens=parse_special_tokens, first=done + 1
        )
        done, n_cut = done + len(some), n_cut + sum(one.n_truncated > 0 for one in read)
        yield read
    if n_cut:
        limit = min(max_tokens or task.model.config.context_length, task.model.config.context_length)
        say(f"{n_cut:,} of {done:,} texts were cut at {limit:,} tokens")
