"""Where words part: which of them a token is of, whether a term is among them, where a long text may be cut."""

import re
from collections.abc import Callable, Iterator

from qkv.choices import Role
from qkv.data.sentences import split_sentences
from qkv.text import Tokenizer


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


def word_of_bytes(tokenizer: Tokenizer, text: str, ids: list[int]) -> list[int | None]:
    """Of each id of an encoded text, which word (parted by white space) it is of; None: what the template added."""
    ends = [len(text[: match.end()].encode()) for match in re.finditer(r"\S+", text)]
    pieces = iter(tokenizer.pieces(text))
    added = _added(tokenizer)
    words: list[int | None] = []
    for number in ids:
        piece = None if number in added else next(pieces, None)
        words.append(None if piece is None else min(sum(piece.end > end for end in ends), len(ends) - 1))
    return words


def words_of_ids(tokenizer: Tokenizer, ids: list[int]) -> list[int | None]:
    """The same for ids that no text was encoded to: by how many words they make together, one more each time."""
    added = _added(tokenizer)
    so_far: list[int] = []
    words: list[int | None] = []
    for number in ids:
        if number in added or number >= tokenizer.vocabulary_size:
            words.append(None)
            continue
        so_far.append(number)
        words.append(max(0, len(tokenizer.decode(so_far, skip_specials=False).split()) - 1))
    return words


def _added(tokenizer: Tokenizer) -> frozenset[int]:
    unknown = tokenizer.find(Role.UNKNOWN)
    return tokenizer.special_ids - ({unknown} if unknown is not None else set())
