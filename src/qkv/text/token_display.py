"""How is one token shown?"""

import json

from qkv.text.tokenizer import Tokenizer


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Its text, with the blank it begins with; the vocabulary's own spelling where it has no text alone.

    That is so for a control token (`<|endoftext|>`), part of a character (`ðŁĺ`) and an id that no token has.
    """
    text = _decodable_text(tokenizer, token_id)
    return _vocabulary_name(tokenizer, token_id) if text is None else text


def quoted_token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The same on one line: a text in quotes, a name without."""
    text = _decodable_text(tokenizer, token_id)
    return _vocabulary_name(tokenizer, token_id) if text is None else json.dumps(text, ensure_ascii=False)


def _decodable_text(tokenizer: Tokenizer, token_id: int) -> str | None:
    if token_id >= tokenizer.vocab_size or token_id in tokenizer.special_ids:
        return None
    # After itself, for a decoder may drop the blank before the first word of a text.
    alone = tokenizer.decode([token_id], skip_special_tokens=False)
    text = tokenizer.decode([token_id, token_id], skip_special_tokens=False)[len(alone) :]
    return None if not text or "\N{REPLACEMENT CHARACTER}" in text else text


def _vocabulary_name(tokenizer: Tokenizer, token_id: int) -> str:
    token = tokenizer.id_to_token(token_id) if token_id < tokenizer.vocab_size else ""
    return token or f"<id {token_id}>"
