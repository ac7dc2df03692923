"""How is one token shown?"""

import json

from qkv.text.tokenizer import Tokenizer


def text_of(tokenizer: Tokenizer, number: int) -> str:
    """Its text, with the blank it begins with; the vocabulary's own spelling where it has no text alone.

    That is so for a control token (`<|endoftext|>`), part of a character (`ðŁĺ`) and an id that no token has.
    """
    text = _text(tokenizer, number)
    return _name(tokenizer, number) if text is None else text


def spelt(tokenizer: Tokenizer, number: int) -> str:
    """The same on one line: a text in quotes, a name without."""
    text = _text(tokenizer, number)
    return _name(tokenizer, number) if text is None else json.dumps(text, ensure_ascii=False)


def _text(tokenizer: Tokenizer, number: int) -> str | None:
    if number >= tokenizer.vocab_size or number in tokenizer.special_ids:
        return None
    # After itself, for a decoder may drop the blank before the first word of a text.
    alone = tokenizer.decode([number], skip_specials=False)
    text = tokenizer.decode([number, number], skip_specials=False)[len(alone) :]
    return None if not text or "\N{REPLACEMENT CHARACTER}" in text else text


def _name(tokenizer: Tokenizer, number: int) -> str:
    token = tokenizer.token(number) if number < tokenizer.vocab_size else ""
    return token or f"<id {number}>"
