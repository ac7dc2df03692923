"""Streamed text equals the decoded text and is never split within a character."""

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
    """A tokenizer like Llama 2's: tokens with ▁, bytes as <0xF0>, and a leading space removed by decoding."""
    words = ["▁", "▁the", "▁cat", "a", "ñ", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = tokenizers.Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend, {})


def end_of_word_bpe() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"lo": 0, "lo</w>": 1, "w</w>": 2}, merges=[]))
    backend.decoder = decoders.BPEDecoder()
    return Tokenizer(backend, {})


def check_streamed_text(tokenizer, ids, skip_special_tokens):
    ids = [token_id % tokenizer.vocab_size for token_id in ids]
    texts = list(stream_text(tokenizer, ids, skip_special_tokens=skip_special_tokens))
    assert "".join(texts) == tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    assert all(texts)
    assert not any(text.endswith("\ufffd") for text in texts[:-1])


@pytest.mark.parametrize("kind", KINDS)
@given(ids=any_ids, skip_special_tokens=st.booleans())
def test_streamed_text_equals_decoded_text_for_any_ids(kind, ids, skip_special_tokens):
    check_streamed_text(trained(kind, SpecialTokenStyle.BERT), ids, skip_special_tokens)


@given(ids=any_ids)
def test_streamed_text_equals_decoded_text_for_raw_bytes(ids):
    check_streamed_text(trained(TokenizerKind.BPE, None, 257), ids, skip_special_tokens=True)


@pytest.mark.parametrize("create_tokenizer", [byte_fallback, end_of_word_bpe])
@given(ids=any_ids)
def test_streamed_text_equals_decoded_text_for_other_decoders(create_tokenizer, ids):
    check_streamed_text(create_tokenizer(), ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text())
def test_streamed_text_equals_decoded_text_for_any_text(kind, text):
    check_streamed_text(trained(kind), trained(kind).encode(text), skip_special_tokens=True)


def test_an_emoji_is_returned_after_its_last_byte():
    tokenizer = trained(TokenizerKind.BPE, None, 257)
    decoder = StreamingDecoder(tokenizer)
    assert [decoder.add(token_id) for token_id in tokenizer.encode("n😀ñ")] == ["n", "", "", "", "😀", "", "ñ"]
    assert decoder.finish() == ""


def test_an_incomplete_character_is_returned_at_the_end():
    tokenizer = trained(TokenizerKind.BPE, None, 257)
    decoder = StreamingDecoder(tokenizer)
    assert [decoder.add(token_id) for token_id in tokenizer.encode("ñ")[:1]] == [""]
    assert decoder.finish() == "\ufffd"


def test_spaces_between_words_are_kept():
    tokenizer = trained(TokenizerKind.WORDPIECE)
    texts = list(stream_text(tokenizer, tokenizer.encode("the cat sat on the mat.")))
    assert "".join(texts) == "the cat sat on the mat."
    assert len(texts) > 3


def test_an_id_outside_the_vocabulary_is_an_error():
    with pytest.raises(InputError, match=r"\b999\b.*\b257\b"):
        StreamingDecoder(trained(TokenizerKind.BPE, None, 257)).add(999)


@pytest.mark.parametrize("first", ["▁the", "a", "<0xC3>"])
def test_a_continued_text_keeps_the_space_after_its_context(first):
    tokenizer = byte_fallback()
    before, after = (
        [tokenizer.backend.token_to_id(token) for token in tokens]
        for tokens in (["▁cat"], [first, "<0xB1>", "▁cat", "a"])
    )
    decoder = StreamingDecoder(tokenizer, context_ids=before)
    continuation = "".join([*map(decoder.add, after), decoder.finish()])
    assert tokenizer.decode(before) + continuation == tokenizer.decode(before + after)
