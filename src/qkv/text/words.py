"""Which word is a token of?"""

import re

from qkv.choices import Role
from qkv.text.tokenizer import Tokenizer


def spans_of(tokenizer: Tokenizer, text: str, ids: list[int]) -> list[tuple[int, int] | None]:
    """Of each id of an encoded text, the UTF-8 bytes it stands for; None: what the template added."""
    pieces = iter(tokenizer.pieces(text))
    added = _added(tokenizer)
    found = (None if number in added else next(pieces, None) for number in ids)
    return [None if piece is None else (piece.start, piece.end) for piece in found]


def word_of_bytes(tokenizer: Tokenizer, text: str, ids: list[int]) -> list[int | None]:
    """Of each id of an encoded text, which word (parted by white space) it is of; None: what the template added."""
    ends = [len(text[: match.end()].encode()) for match in re.finditer(r"\S+", text)]
    return [
        None if span is None else min(sum(span[1] > end for end in ends), len(ends) - 1)
        for span in spans_of(tokenizer, text, ids)
    ]


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
