"""Where may a long text be cut without changing its tokens?

Before a single blank between two characters that are not blank. No token of the usual tokenizers (GPT-2's
and later byte-level patterns, BERT's words, SentencePiece's ▁words) reaches across that place, so the parts'
tokens joined are the whole's. The exceptions, both rare, move a token or two at the cut: a run of `MAX_PART`
characters without such a place is cut anyway, and a tokenizer that puts a blank before every text it gets
(Llama 2's) puts one before every part.
"""

import re
from collections.abc import Iterator

MAX_PART = 1 << 20
"""Characters. `tokenizers` needs about 100 bytes a character while it works."""

_SEAM = re.compile(r"(?<=\S) (?=\S)")


def cut(text: str, *, max_part: int = MAX_PART) -> Iterator[str]:
    """Parts of at most `max_part` characters; the text itself where it is short enough."""
    start = 0
    while len(text) - start > max_part:
        end = seam(text, start=start, stop=start + max_part)
        yield text[start:end]
        start = end
    if start < len(text) or not text:
        yield text[start:]


def seam(text: str, *, start: int, stop: int) -> int:
    """The last place before `stop` where `text` may be cut; `stop` itself if there is none after `start`."""
    end = stop
    while (blank := text.rfind(" ", start + 1, end)) >= 0:
        if _SEAM.match(text, blank):
            return blank
        end = blank
    return stop
