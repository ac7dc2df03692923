"""Where words part: whether there are any, whether a term is among them, where a long text may be cut."""

import re
from collections.abc import Callable, Iterator

from qkv.data.sentence_splitter import split_sentences

Fits = Callable[[str], bool]


def split_to_fit(text: str, fits: Fits, *, together: Fits | None = None) -> list[str]:
    """Whole where it fits; else cut at ends of sentences, and between words where one sentence is too long itself.

    `together`: whether sentences may stay in one part, where that is asked for more. A single word that does not
    fit stays as it is.
    """
    together = together or fits
    return [text] if together(text) else list(_merge_while_fitting(_split_sentences_to_fit(text, fits), together))


def _split_sentences_to_fit(text: str, fits: Fits) -> Iterator[str]:
    for sentence in split_sentences(text):
        yield from [sentence] if fits(sentence) else _merge_while_fitting(iter(sentence.split()), fits)


def _merge_while_fitting(pieces: Iterator[str], fits: Fits) -> Iterator[str]:
    """As many pieces together as fit."""
    held = ""
    for piece in pieces:
        if held and not fits(f"{held} {piece}"):
            yield held
            held = piece
        else:
            held = f"{held} {piece}".strip()
    if held:
        yield held


def has_words(text: str) -> bool:
    """A letter or a digit of any script; signs, emoji and what cannot be seen have nothing to translate."""
    return any(character.isalnum() for character in text)


def to_sentence_case(text: str) -> str:
    """As a sentence is written: its first letter alone is a capital."""
    return re.sub(r"[^\W\d_]", lambda first: first[0].upper(), text.lower(), count=1)


def contains_term(text: str, term: str) -> bool:
    """Whether the term stands in the text as whole words, in capitals or not."""
    return re.search(rf"(?<!\w){re.escape(term.strip())}(?!\w)", text, re.IGNORECASE) is not None
