"""Text that comes piece by piece is the whole text, and no piece ends inside a character."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from qkv.choices import SpecialTokenStyle, TokenizerKind
from qkv.errors import InputError
from qkv.text import StreamingDecoder, Tokenizer, stream_text
from tests.text.samples import trained

KINDS = list(TokenizerKind)
any_ids = st.lists(st.integers(0, 10**6), max_size=40)


def byte_fallback() -> Tokenizer:
    """Llama 2's shape: pieces with ▁, bytes as <0xF0>, a blank stripped from the front."""
    words = ["▁", "▁the", "▁cat", "a", "ñ", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = tokenizers.Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend, {})


def old_bpe() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"lo": 0, "lo</w>": 1, "w</w>": 2}, merges=[]))
    backend.decoder = decoders.BPEDecoder()
    return Tokenizer(backend, {})


def check_the_law(tokenizer, ids, skip_special_tokens):
    ids = [number % tokenizer.vocab_size for number in ids]
    pieces = list(stream_text(tokenizer, ids, skip_special_tokens=skip_special_tokens))
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    assert all(pieces)
    assert not any(piece.endswith("\ufffd") for piece in pieces[:-1])


@pytest.mark.parametrize("kind", KINDS)
@given(ids=any_ids, skip_special_tokens=st.booleans())
def test_streamed_is_whole_for_any_ids(kind, ids, skip_special_tokens):
    check_the_law(trained(kind, SpecialTokenStyle.BERT), ids, skip_special_tokens)


@given(ids=any_ids)
def test_streamed_is_whole_for_raw_bytes(ids):
    check_the_law(trained(TokenizerKind.BPE, None, 257), ids, skip_special_tokens=True)


@pytest.mark.parametrize("make", [byte_fallback, old_bpe])
@given(ids=any_ids)
def test_streamed_is_whole_for_other_decoders(make, ids):
    check_the_law(make(), ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text())
def test_streamed_is_whole_for_any_text(kind, text):
    check_the_law(trained(kind), trained(kind).encode(text), skip_special_tokens=True)


def test_an_emoji_comes_at_once_and_not_before_its_last_byte():
    tokenizer = trained(TokenizerKind.BPE, None, 257)
    decoder = StreamingDecoder(tokenizer)
    assert [decoder.add(number) for number in tokenizer.encode("n😀ñ")] == ["n", "", "", "", "😀", "", "ñ"]
    assert decoder.finish() == ""


def test_half_a_character_comes_out_at_the_end():
    tokenizer = trained(TokenizerKind.BPE, None, 257)
    decoder = StreamingDecoder(tokenizer)
    assert [decoder.add(number) for number in tokenizer.encode("ñ")[:1]] == [""]
    assert decoder.finish() == "\ufffd"


def test_words_keep_the_blank_between_them():
    tokenizer = trained(TokenizerKind.WORDPIECE)
    pieces = list(stream_text(tokenizer, tokenizer.encode("the cat sat on the mat.")))
    assert "".join(pieces) == "the cat sat on the mat."
    assert len(pieces) > 3


def test_an_id_outside_the_vocabulary_is_refused():
    with pytest.raises(InputError, match="id 999 is outside the tokenizer's vocabulary of 257"):
        StreamingDecoder(trained(TokenizerKind.BPE, None, 257)).add(999)


@pytest.mark.parametrize("first", ["▁the", "a", "<0xC3>"])
def test_a_text_that_goes_on_keeps_the_blank_between_it_and_what_was_before(first):
    tokenizer = byte_fallback()
    before, after = (
        [tokenizer.backend.token_to_id(token) for token in tokens]
        for tokens in (["▁cat"], [first, "<0xB1>", "▁cat", "a"])
    )
    decoder = StreamingDecoder(tokenizer, before=before)
    said = "".join([*map(decoder.add, after), decoder.finish()])
    assert tokenizer.decode(before) + said == tokenizer.decode(before + after)
