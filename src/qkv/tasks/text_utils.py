"""Split texts into parts of limited length, normalize their case, and search them for terms."""

import re
from collections.abc import Callable, Iterator

from qkv.data.sentence_splitter import split_sentences

Fits = Callable[[str], bool]


def split_to_fit(text: str, fits: Fits, *, fits_joined: Fits | None = None) -> list[str]:
    """Split a text into parts at sentence boundaries, or between words if a sentence is too long.

    `fits` returns whether a part is short enough. Sentences are joined as long as `fits_joined`, which defaults to
    `fits`, returns true for the result. A single word that does not fit is returned unchanged.
    """
    fits_joined = fits_joined or fits
    return (
        [text]
        if fits_joined(text)
        else list(_join_with_spaces_while_fitting(_split_sentences_to_fit(text, fits), fits_joined))
    )


def _split_sentences_to_fit(text: str, fits: Fits) -> Iterator[str]:
    for sentence in split_sentences(text):
        yield from [sentence] if fits(sentence) else _join_with_spaces_while_fitting(iter(sentence.split()), fits)


def _join_with_spaces_while_fitting(parts: Iterator[str], fits: Fits) -> Iterator[str]:
    """Join consecutive parts with spaces as long as the result fits."""
    current = ""
    for part in parts:
        if current and not fits(f"{current} {part}"):
            yield current
            current = part
        else:
            current = f"{current} {part}".strip()
    if current:
        yield current


def has_words(text: str) -> bool:
    """Return whether a text contains a letter or digit in any script.

    Texts without letters and digits contain nothing to translate.
    """
    return any(character.isalnum() for character in text)


def to_sentence_case(text: str) -> str:
    """Convert a text to lowercase, and capitalize its first letter."""
    return re.sub(r"[^\W\d_]", lambda first: first[0].upper(), text.lower(), count=1)


def contains_term(text: str, term: str) -> bool:
    """Return whether a text contains a term as a whole word or words, ignoring case."""
    return re.search(rf"(?<!\w){re.escape(term.strip())}(?!\w)", text, re.IGNORECASE) is not None
