"""Format tokens for display, and find the words to which they belong."""

import json
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from qkv.choices import SpecialToken
from qkv.text.tokenizer import StreamingDecoder, Tokenizer

Span = tuple[int, int]


def token_text_or_vocabulary_name(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the text of a token, including any leading space.

    The vocabulary spelling is returned for tokens without text of their own: special tokens (`<|endoftext|>`), parts of
    a character (`ðŁĺ`) and unused ids.
    """
    text = _decodable_text(tokenizer, token_id)
    return _vocabulary_name(tokenizer, token_id) if text is None else text


def quoted_token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the text of a token in JSON quotes, or its vocabulary spelling without quotes if it has no text."""
    text = _decodable_text(tokenizer, token_id)
    return _vocabulary_name(tokenizer, token_id) if text is None else json.dumps(text, ensure_ascii=False)


def _decodable_text(tokenizer: Tokenizer, token_id: int) -> str | None:
    if token_id >= tokenizer.vocab_size or token_id in tokenizer.special_ids:
        return None
    # Decode two copies of the token and drop the first one because decoders may remove a space at the start of a text.
    first = tokenizer.decode([token_id], skip_special_tokens=False)
    text = tokenizer.decode([token_id, token_id], skip_special_tokens=False)[len(first) :]
    return None if not text or "\N{REPLACEMENT CHARACTER}" in text else text


def _vocabulary_name(tokenizer: Tokenizer, token_id: int) -> str:
    token = tokenizer.id_to_token(token_id) if token_id < tokenizer.vocab_size else ""
    return token or f"<id {token_id}>"


def token_byte_spans(
    tokenizer: Tokenizer, text: str, ids: list[int], *, parse_special_tokens: bool = False
) -> list[Span | None]:
    """Map each token id to the UTF-8 byte range that it covers in the text.

    The range is None for special tokens that the template added.
    """
    remaining = deque(tokenizer.token_spans_without_template(text, parse_special_tokens=parse_special_tokens))
    template_ids = _template_ids(tokenizer)
    spans: list[Span | None] = []
    for token_id in ids:
        # A special token from the text matches the next remaining span. Otherwise, the template added the token.
        if not remaining or (token_id in template_ids and token_id != remaining[0].id):
            spans.append(None)
        else:
            span = remaining.popleft()
            spans.append((span.start, span.end))
    return spans


def word_indices_of_spans(text: str, spans: Sequence[Span | None]) -> list[int | None]:
    """Return the index of the whitespace-separated word that contains each span, or None if the span is None."""
    ends = list(accumulate(len(part.encode()) for part in re.findall(r"\s*\S+", text)))
    return [None if span is None or not ends else min(bisect_left(ends, span[1]), len(ends) - 1) for span in spans]


def word_indices_of_ids(tokenizer: Tokenizer, ids: list[int]) -> list[int | None]:
    """Return the word index of each token id, or None for special tokens, without using the original text.

    The ids are decoded incrementally, and the words of the decoded text are counted after each id.
    """
    template_ids = _template_ids(tokenizer)
    decoder = StreamingDecoder(tokenizer, skip_special_tokens=False)
    n_words, last = 0, " "
    words: list[int | None] = []
    for token_id in ids:
        if token_id in template_ids or token_id >= tokenizer.vocab_size:
            words.append(None)
            continue
        text = decoder.add(token_id)
        n_words += _count_new_words(last, text)
        last = text[-1:] or last
        words.append(max(0, n_words + _count_new_words(last, decoder.pending_text) - 1))
    return words


def _count_new_words(last: str, text: str) -> int:
    """Count the words that start in `text`, given that the preceding character is `last`."""
    continues_word = not last.isspace() and not text[:1].isspace()
    return max(0, len(text.split()) - continues_word)


def _template_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return all special token ids except the id of <unk>, which represents part of the text."""
    unknown = tokenizer.find_special_id(SpecialToken.UNK)
    return tokenizer.special_ids - ({unknown} if unknown is not None else set())
