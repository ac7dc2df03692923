"""Split long texts into chunks without changing their tokens.

Texts are split before a single space between two non-space characters. In common tokenizers (byte-level patterns of
GPT-2 and later, words of BERT, ▁words of SentencePiece), no token crosses such a split point, so the chunks have the
same tokens as the text. In two rare cases, one or two tokens at the split differ: a run of
`MAX_CHUNK_CHARACTERS` characters without a split point is split anyway, and tokenizers that prepend a space to every
text (Llama 2) prepend one to every chunk.
"""

import re
from collections.abc import Iterator

MAX_CHUNK_CHARACTERS = 1 << 20
"""Maximum number of characters per chunk. `tokenizers` temporarily uses about 100 bytes per character."""

_SPLIT_POINT = re.compile(r"(?<=\S) (?=\S)")


def split_into_chunks(text: str, *, max_characters: int = MAX_CHUNK_CHARACTERS) -> Iterator[str]:
    """Split a text into chunks of at most `max_characters` characters."""
    start = 0
    while len(text) - start > max_characters:
        end = find_last_split_point_or_stop(text, start=start, stop=start + max_characters)
        yield text[start:end]
        start = end
    if start < len(text) or not text:
        yield text[start:]


def find_last_split_point_or_stop(text: str, *, start: int, stop: int) -> int:
    """Return the last split point before `stop`, or `stop` if there is no split point after `start`."""
    end = stop
    while (space := text.rfind(" ", start + 1, end)) >= 0:
        if _SPLIT_POINT.match(text, space):
            return space
        end = space
    return stop
