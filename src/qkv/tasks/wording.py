"""Where words part: whether a term is among them, where a long text may be cut."""

import re
from collections.abc import Callable, Iterator

from qkv.data.sentences import split_sentences


def parts(text: str, fits: Callable[[str], bool]) -> list[str]:
    """Whole where it fits; else cut at ends of sentences, and between words where one sentence is too long itself.

    A single word that does not fit stays as it is.
    """
    if fits(text):
        return [text]
    return list(_joined(_sentences(text, fits), fits))


def _sentences(text: str, fits: Callable[[str], bool]) -> Iterator[str]:
    for sentence in split_sentences(text):
        yield from [sentence] if fits(sentence) else _joined(iter(sentence.split()), fits)


def _joined(pieces: Iterator[str], fits: Callable[[str], bool]) -> Iterator[str]:
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


def contains(text: str, term: str) -> bool:
    """Whether the term stands in the text as whole words, in capitals or not."""
    return re.search(rf"(?<!\w){re.escape(term.strip())}(?!\w)", text, re.IGNORECASE) is not None
