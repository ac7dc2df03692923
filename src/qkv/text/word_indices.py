"""Which word is a token of?"""

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from qkv.choices import SpecialToken
from qkv.text.streaming_decoder import StreamingDecoder
from qkv.text.tokenizer import Tokenizer

Span = tuple[int, int]


def token_byte_spans(
    tokenizer: Tokenizer, text: str, ids: list[int], *, parse_special_tokens: bool = False
) -> list[Span | None]:
    """Of each id of an encoded text, the UTF-8 bytes it stands for; None: what the template added."""
    pieces = deque(tokenizer.token_spans(text, parse_special_tokens=parse_special_tokens))
    template_ids = _template_ids(tokenizer)
    spans: list[Span | None] = []
    for token_id in ids:
        # A special token that the text spells is a piece of it; one that is not comes from the template.
        if not pieces or (token_id in template_ids and token_id != pieces[0].id):
            spans.append(None)
        else:
            piece = pieces.popleft()
            spans.append((piece.start, piece.end))
    return spans


def word_indices_of_spans(text: str, spans: Sequence[Span | None]) -> list[int | None]:
    """Of each span, which word (parted by white space) of the text it is of; None: of none."""
    ends = list(accumulate(len(part.encode()) for part in re.findall(r"\s*\S+", text)))
    return [None if span is None or not ends else min(bisect_left(ends, span[1]), len(ends) - 1) for span in spans]


def word_indices_of_ids(tokenizer: Tokenizer, ids: list[int]) -> list[int | None]:
    """The same for ids that no text was encoded to: by how many words they make together, one more each time."""
    template_ids = _template_ids(tokenizer)
    decoder = StreamingDecoder(tokenizer, skip_special_tokens=False)
    n_words, last = 0, " "
    words: list[int | None] = []
    for token_id in ids:
        if token_id in template_ids or token_id >= tokenizer.vocab_size:
            words.append(None)
            continue
        piece = decoder.add(token_id)
        n_words += _count_new_words(last, piece)
        last = piece[-1:] or last
        words.append(max(0, n_words + _count_new_words(last, decoder.pending_text) - 1))
    return words


def _count_new_words(last: str, text: str) -> int:
    """How many words a text begins after that character: one that goes on has begun already."""
    goes_on = not last.isspace() and not text[:1].isspace()
    return max(0, len(text.split()) - goes_on)


def _template_ids(tokenizer: Tokenizer) -> frozenset[int]:
    unknown = tokenizer.find_special_id(SpecialToken.UNK)
    return tokenizer.special_ids - ({unknown} if unknown is not None else set())
