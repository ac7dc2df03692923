"""One text or a pair as BERT reads it, many at a time; cut to a length where that is asked."""

from collections.abc import Sequence

from qkv.text.border import border
from qkv.text.tokenizer import EncodedPair, Tokenizer, check_unicode


def encode_rows(
    tokenizer: Tokenizer, rows: Sequence[tuple[str, ...]], *, parse_specials: bool = False
) -> list[EncodedPair]:
    """Each row is (text,) or (text, text); nothing is cut."""
    for row in rows:
        for text in row:
            check_unicode(text)
    inputs = [row[0] if len(row) == 1 else row for row in rows]
    with border("the texts cannot be encoded"):
        backend = tokenizer.parsing if parse_specials else tokenizer.backend
        return [EncodedPair(one.ids, one.type_ids) for one in backend.encode_batch_fast(inputs)]


def encode_cut(
    tokenizer: Tokenizer, row: tuple[str, ...], max_length: int, *, parse_specials: bool = False
) -> EncodedPair:
    """The row with as many tokens as fit; of a pair the longer text loses first. Special tokens stay."""
    backend = tokenizer.parsing if parse_specials else tokenizer.backend
    with border("the text cannot be encoded"):
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
        return EncodedPair(whole.ids, whole.type_ids)
