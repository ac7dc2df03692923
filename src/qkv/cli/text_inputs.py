"""Read the input texts of a command and process them in batches.

The texts are the command's arguments or, if there are none, the lines of standard input. Commands that print one line
per text print a blank line for a blank text so that the lines of input and output correspond. The exception is
`generate`, which continues an empty prompt.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from qkv.cli.progress import print_status
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.tasks import TextEncoder, TokenizedInput
    from qkv.tasks.text_encoder import TextOrPair

Result = TypeVar("Result")

TEXTS_PER_BATCH = 2048
"""Number of texts that are sorted by length and processed at a time, which is limited because a large input may not fit
into memory."""


def iter_input_texts(arguments: list[str] | None) -> Iterator[str]:
    """Yield the texts given as arguments or, if there are none, the lines of standard input."""
    yield from arguments or iter_file_or_stdin_lines("-")


def iter_file_or_stdin_lines(path: str) -> Iterator[str]:
    """Yield the lines of a file or of standard input without line endings.

    `-` stands for standard input. Compressed files are decompressed. An empty file raises `InputError`.
    """
    from qkv.data.documents import read_utf8_lines
    from qkv.data.text_sources import STANDARD_INPUT, open_raw_and_decompressed, parse_single_file_source

    name = "standard input" if path == STANDARD_INPUT else path
    empty = True
    with open_raw_and_decompressed(parse_single_file_source(path)) as (_, stream):
        for line in read_utf8_lines(name, stream):
            empty = False
            yield line.rstrip("\r\n")
    if empty:
        raise InputError(
            f"no text was given as an argument, and {name} is empty"
            if path == STANDARD_INPUT
            else f"{name}: the file is empty"
        )


def split_tab_separated_pairs(texts: Iterable[str]) -> "Iterator[TextOrPair]":
    """Yield each text that contains a tab as a pair of texts, and yield all other texts unchanged."""
    for number, text in enumerate(texts, start=1):
        columns = text.split("\t")
        if len(columns) > 2:
            raise InputError(
                f"text {number} has {len(columns)} columns, but must have 1 (a text) or 2 (a pair, separated by a tab)"
            )
        yield (columns[0], columns[1]) if len(columns) == 2 else text


def escape_newlines(text: str) -> str:
    """Escape line breaks so that a text is printed on a single line."""
    return text.replace("\r", "\\r").replace("\n", "\\n")


def is_blank(text: "TextOrPair | tuple[str, ...]") -> bool:
    """Return whether a text contains only whitespace. For a pair, both texts must contain only whitespace."""
    return not "".join(text).strip()


def _is_not_blank(tokenized: "TokenizedInput") -> bool:
    return not is_blank(tokenized.texts)


def map_tokenized_texts(
    batches: "Iterable[list[TokenizedInput]]",
    function: "Callable[[list[TokenizedInput]], Sequence[Result]]",
    *,
    is_included: "Callable[[TokenizedInput], bool]" = _is_not_blank,
) -> "Iterator[tuple[TokenizedInput, Result | None]]":
    """Apply a batched function to the texts and yield (text, result) in the order of the input.

    Texts that are not included (by default: blank texts) are skipped, and their result is None.
    """
    for batch in batches:
        included = [is_included(tokenized) for tokenized in batch]
        selected = [tokenized for tokenized, include in zip(batch, included, strict=True) if include]
        results = iter(function(selected) if selected else ())
        for tokenized, include in zip(batch, included, strict=True):
            yield tokenized, next(results) if include else None


def tokenize_in_batches_and_report_truncation(
    task: "TextEncoder",
    texts: "Iterable[TextOrPair]",
    *,
    truncate: bool,
    max_tokens: int | None = None,
    parse_special_tokens: bool = False,
) -> "Iterator[list[TokenizedInput]]":
    """Tokenize the texts in batches of `TEXTS_PER_BATCH`, and print how many texts were truncated."""
    remaining, n_texts, n_truncated = iter(texts), 0, 0
    while batch := list(islice(remaining, TEXTS_PER_BATCH)):
        tokenized_batch = task.tokenize(
            batch,
            truncate=truncate,
            max_tokens=max_tokens,
            parse_special_tokens=parse_special_tokens,
            first_number=n_texts + 1,
        )
        n_texts += len(batch)
        n_truncated += sum(tokenized.n_truncated > 0 for tokenized in tokenized_batch)
        yield tokenized_batch
    if n_truncated:
        limit = min(max_tokens or task.model.config.context_length, task.model.config.context_length)
        print_status(f"{n_truncated:,} of {n_texts:,} texts were truncated to {limit:,} tokens")
