"""Decode a stream of token ids to text without splitting characters."""

import re
from collections.abc import Iterable, Iterator, Sequence

from qkv.text.tokenizer import Tokenizer

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class StreamingDecoder:
    """Incremental decoder whose concatenated outputs equal the result of `Tokenizer.decode` for all ids.

    The decoder holds back text that later ids may change: incomplete characters and runs of byte tokens such as
    `<0xF0>`.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, context_ids: Sequence[int] = ()
    ) -> None:
        """Create a decoder for text that continues the text of `context_ids`.

        The context matters because SentencePiece decoders remove a space at the start of a text.
        """
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        # A token's text depends at most on the previous token, so the ids of the last output are sufficient context.
        self._context = [token_id for token_id in context_ids if token_id not in tokenizer.special_ids]
        self._pending: list[int] = []

    def add(self, token_id: int) -> str:
        """Add an id and return the newly completed text, which may be empty."""
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
        """Return the pending text. Incomplete characters become U+FFFD, as in `Tokenizer.decode`."""
        text = self.pending_text
        self._context, self._pending = [], []
        return text

    @property
    def pending_text(self) -> str:
        """Text that the decoder is holding back, decoded as if no more ids followed."""
        context = self._tokenizer.decode(self._context, skip_special_tokens=False)
        return self._tokenizer.decode(self._context + self._pending, skip_special_tokens=False)[len(context) :]


def stream_text(tokenizer: Tokenizer, ids: Iterable[int], *, skip_special_tokens: bool = True) -> Iterator[str]:
    """Decode ids incrementally, and yield each non-empty piece of text as soon as it is complete."""
    decoder = StreamingDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
    for token_id in ids:
        if text := decoder.add(token_id):
            yield text
    if text := decoder.finish():
        yield text
