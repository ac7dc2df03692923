"""Ids one by one to text as it becomes certain: a character is never split.

The law: the pieces joined are `decode` of all ids.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from qkv.text.tokenizer import Tokenizer

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class StreamingDecoder:
    """Holds back what a later id may still change: part of a character, or a run of `<0xF0>` bytes."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, before: Sequence[int] = ()) -> None:
        """`before`: ids that the text goes on from. SentencePiece's decoders drop the blank a whole text opens with."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        # Decoders look at most at the neighbour before, so the ids of the last piece given are context enough.
        self._context = [token_id for token_id in before if token_id not in tokenizer.special_ids]
        self._pending: list[int] = []

    def add(self, token_id: int) -> str:
        """The text that is certain now and was not before; often empty."""
        token = self._tokenizer.id_to_token(token_id)
        if token_id in self._skipped:
            return ""
        self._pending.append(token_id)
        text = self.pending_text
        if not text or text.endswith(_UNFINISHED) or _BYTE.fullmatch(token):
            return ""
        self._context, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        """What was held back; a character that never came whole is U+FFFD, as in `decode`."""
        text = self.pending_text
        self._context, self._pending = [], []
        return text

    @property
    def pending_text(self) -> str:
        """What is not certain yet, as `decode` would show it if no more came."""
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        return self._tokenizer.decode(self._context + self._pending, skip_special_tokens=False)[len(before) :]


def stream_text(tokenizer: Tokenizer, ids: Iterable[int], *, skip_special_tokens: bool = True) -> Iterator[str]:
    """Pieces of text as the ids arrive, none of them empty."""
    decoder = StreamingDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
    for token_id in ids:
        if piece := decoder.add(token_id):
            yield piece
    if piece := decoder.finish():
        yield piece
