"""Where may a long text be cut without changing its tokens?

Before a single blank between two characters that are not blank. No token of the usual tokenizers (GPT-2's
and later byte-level patterns, BERT's words, SentencePiece's ▁words) reaches across that place, so the parts'
tokens joined are the whole's. The exceptions, both rare, move a token or two at the cut: a run of `MAX_CHUNK_CHARACTERS`
characters without such a place is cut anyway, and a tokenizer that puts a blank before every text it gets
(Llama 2's) puts one before every part.
"""

import re
from collections.abc import Iterator

MAX_CHUNK_CHARACTERS = 1 << 20
"""Characters. `tokenizers` needs about 100 bytes a character while it works."""

_SPLIT_POINT = re.compile(r"(?<=\S) (?=\S)")


def split_into_chunks(text: str, *, max_characters: int = MAX_CHUNK_CHARACTERS) -> Iterator[str]:
    """Parts of at most `max_characters` characters; the text itself where it is short enough."""
    start = 0
    while len(text) - start > max_characters:
        end = find_split_point(text, start=start, stop=start + max_characters)
        yield text[start:end]
        start = end
    if start < len(text) or not text:
        yield text[start:]


def find_split_point(text: str, *, start: int, stop: int) -> int:
    """The last place before `stop` where `text` may be cut; `stop` itself if there is none after `start`."""
    end = stop
    while (blank := text.rfind(" ", start + 1, end)) >= 0:
        if _SPLIT_POINT.match(text, blank):
            return blank
        end = blank
    return stop
