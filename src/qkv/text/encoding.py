"""One text or a pair as BERT reads it, many at a time; cut to a length where that is asked."""

from collections.abc import Sequence

from qkv.text.rust_errors import convert_rust_errors
from qkv.text.tokenizer import Encoding, Tokenizer, check_encodable


def encode_texts(
    tokenizer: Tokenizer, rows: Sequence[tuple[str, ...]], *, parse_special_tokens: bool = False
) -> list[Encoding]:
    """Each row is (text,) or (text, text); nothing is cut."""
    for row in rows:
        for text in row:
            check_encodable(text)
    inputs = [row[0] if len(row) == 1 else row for row in rows]
    with convert_rust_errors("the texts cannot be encoded"):
        backend = tokenizer.special_parsing_backend if parse_special_tokens else tokenizer.backend
        return [Encoding(one.ids, one.type_ids) for one in backend.encode_batch_fast(inputs)]


def encode_truncated(
    tokenizer: Tokenizer, row: tuple[str, ...], max_length: int, *, parse_special_tokens: bool = False
) -> Encoding:
    """The row with as many tokens as fit; of a pair the longer text loses first. Special tokens stay."""
    backend = tokenizer.special_parsing_backend if parse_special_tokens else tokenizer.backend
    with convert_rust_errors("the text cannot be encoded"):
        parts = [backend.encode(text, add_special_tokens=False) for text in row]
        left = max_length - backend.num_special_tokens_to_add(is_pair=len(parts) == 2)
        lengths = [len(part.ids) for part in parts]
        if len(parts) == 1:
            keep = [left]
        else:
            shorter = min(*lengths, left // 2)
            keep = [shorter, left - shorter] if lengths[0] <= lengths[1] else [left - shorter, shorter]
        for part, n in zip(parts, keep, strict=True):
            part.truncate(n)
        whole = backend.post_process(parts[0], parts[1] if len(parts) == 2 else None)
        return Encoding(whole.ids, whole.type_ids)
