"""Convert single tokens to text for display."""

import json

from qkv.text.tokenizer import Tokenizer


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
