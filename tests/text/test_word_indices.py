"""Tokens are told by word: of a text by their bytes, of ids alone by the words they make."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.choices import SpecialToken, SpecialTokenStyle, TokenizerKind
from qkv.text import Tokenizer
from qkv.text.word_indices import token_byte_spans, word_indices_of_ids, word_indices_of_spans
from tests.text.samples import trained
from tests.text.test_streaming_decoder import any_ids, byte_fallback


def words_made(tokenizer, ids):
    """By definition: of all ids so far, the number of words, less one."""
    so_far, words = [], []
    left_out = tokenizer.special_ids - {tokenizer.find_special_id(SpecialToken.UNK)}
    for number in ids:
        if number not in left_out:
            so_far.append(number)
        text = tokenizer.decode(so_far, skip_special_tokens=False)
        words.append(None if number in left_out else max(0, len(text.split()) - 1))
    return words


def check_the_words(tokenizer, ids):
    ids = [number % tokenizer.vocab_size for number in ids]
    assert word_indices_of_ids(tokenizer, ids) == words_made(tokenizer, ids)


@pytest.mark.parametrize("kind", list(TokenizerKind))
@given(ids=any_ids)
def test_ids_are_of_the_words_they_make(kind, ids):
    check_the_words(trained(kind, SpecialTokenStyle.BERT), ids)


@given(ids=any_ids)
def test_so_are_single_bytes(ids):
    check_the_words(byte_fallback(), ids)
    check_the_words(trained(TokenizerKind.BPE, None, 257), ids)


@given(text=st.text())
def test_words_of_encoded_ids_are_those_of_the_text(text):
    bpe = trained(TokenizerKind.BPE)
    check_the_words(bpe, bpe.encode(text))


def test_ten_times_the_ids_take_ten_times_the_decoding(monkeypatch):
    bpe, decode, n_decoded = trained(TokenizerKind.BPE), Tokenizer.decode, [0]

    def counted(tokenizer, ids, **options):
        n_decoded[0] += len(ids)
        return decode(tokenizer, ids, **options)

    monkeypatch.setattr(Tokenizer, "decode", counted)

    def work(n):
        n_decoded[0] = 0
        word_indices_of_ids(bpe, bpe.encode("cat " * n))
        return n_decoded[0]

    assert 0 < work(3_000) <= 10 * work(300) + 100


def test_a_special_token_that_the_text_spells_is_a_piece_of_it():
    bert = trained(TokenizerKind.WORDPIECE, SpecialTokenStyle.BERT)
    text = "the [MASK] the"
    ids = bert.encode(text, parse_special_tokens=True)
    spans = token_byte_spans(bert, text, ids, parse_special_tokens=True)
    assert (spans[0], spans[-1]) == (None, None)
    at = ids.index(bert.special_id(SpecialToken.MASK))
    assert text[slice(*spans[at])] == "[MASK]"
    words = word_indices_of_spans(text, spans)
    assert words[at] == 1
    assert words[-2] == 2


def test_blanks_alone_are_of_no_word():
    assert word_indices_of_spans("  ", [(0, 2)]) == [None]
