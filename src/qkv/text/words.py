"""Which word is a token of?"""

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from qkv.choices import Role
from qkv.text.streaming import StreamingDecoder
from qkv.text.tokenizer import Tokenizer

Span = tuple[int, int]


def spans_of(tokenizer: Tokenizer, text: str, ids: list[int], *, parse_specials: bool = False) -> list[Span | None]:
    """Of each id of an encoded text, the UTF-8 bytes it stands for; None: what the template added."""
    pieces = deque(tokenizer.pieces(text, parse_specials=parse_specials))
    added = _added(tokenizer)
    spans: list[Span | None] = []
    for number in ids:
        # A special token that the text spells is a piece of it; one that is not comes from the template.
        if not pieces or (number in added and number != pieces[0].id):
            spans.append(None)
        else:
            piece = pieces.popleft()
            spans.append((piece.start, piece.end))
    return spans


def word_of_bytes(text: str, spans: Sequence[Span | None]) -> list[int | None]:
    """Of each span, which word (parted by white space) of the text it is of; None: of none."""
    ends = list(accumulate(len(part.encode()) for part in re.findall(r"\s*\S+", text)))
    return [None if span is None or not ends else min(bisect_left(ends, span[1]), len(ends) - 1) for span in spans]


def words_of_ids(tokenizer: Tokenizer, ids: list[int]) -> list[int | None]:
    """The same for ids that no text was encoded to: by how many words they make together, one more each time."""
    added = _added(tokenizer)
    decoder = StreamingDecoder(tokenizer, skip_specials=False)
    n_words, last = 0, " "
    words: list[int | None] = []
    for number in ids:
        if number in added or number >= tokenizer.vocab_size:
            words.append(None)
            continue
        piece = decoder.add(number)
        n_words += _n_more(last, piece)
        last = piece[-1:] or last
        words.append(max(0, n_words + _n_more(last, decoder.held_back) - 1))
    return words


def _n_more(last: str, text: str) -> int:
    """How many words a text begins after that character: one that goes on has begun already."""
    goes_on = not last.isspace() and not text[:1].isspace()
    return max(0, len(text.split()) - goes_on)


def _added(tokenizer: Tokenizer) -> frozenset[int]:
    unknown = tokenizer.find(Role.UNKNOWN)
    return tokenizer.special_ids - ({unknown} if unknown is not None else set())
