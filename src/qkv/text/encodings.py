"""Encode texts and text pairs, either in batches or with truncation."""

from collections.abc import Sequence

from qkv.text.rust_errors import convert_errors_to_input_error
from qkv.text.tokenizer import Encoding, Tokenizer, check_encodable


def encode_texts(
    tokenizer: Tokenizer, rows: Sequence[tuple[str, ...]], *, parse_special_tokens: bool = False
) -> list[Encoding]:
    """Encode rows of one text `(text,)` or two texts `(text, text)` without truncation."""
    for row in rows:
        for text in row:
            check_encodable(text)
    inputs = [row[0] if len(row) == 1 else row for row in rows]
    with convert_errors_to_input_error("the texts cannot be encoded"):
        backend = tokenizer.special_parsing_backend if parse_special_tokens else tokenizer.backend
        return [Encoding(encoding.ids, encoding.type_ids) for encoding in backend.encode_batch_fast(inputs)]


def encode_truncated(
    tokenizer: Tokenizer, row: tuple[str, ...], max_length: int, *, parse_special_tokens: bool = False
) -> Encoding:
    """Encode a text or text pair and truncate it to `max_length` tokens, including special tokens.

    The longer text of a pair is truncated first.
    """
    backend = tokenizer.special_parsing_backend if parse_special_tokens else tokenizer.backend
    with convert_errors_to_input_error("the text cannot be encoded"):
        encodings = [backend.encode(text, add_special_tokens=False) for text in row]
        budget = max_length - backend.num_special_tokens_to_add(is_pair=len(encodings) == 2)
        lengths = [len(encoding.ids) for encoding in encodings]
        if len(encodings) == 1:
            limits = [budget]
        else:
            shorter = min(*lengths, budget // 2)
            limits = [shorter, budget - shorter] if lengths[0] <= lengths[1] else [budget - shorter, shorter]
        for encoding, limit in zip(encodings, limits, strict=True):
            encoding.truncate(limit)
        combined = backend.post_process(encodings[0], encodings[1] if len(encodings) == 2 else None)
        return Encoding(combined.ids, combined.type_ids)
