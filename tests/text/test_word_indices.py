"""Word indices of tokens, computed from byte spans or from ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.choices import SpecialToken, SpecialTokenStyle, TokenizerKind
from qkv.text import Tokenizer
from qkv.text.token_display import token_byte_spans, word_indices_of_ids, word_indices_of_spans
from tests.text.samples import trained
from tests.text.test_streaming_decoder import any_ids, byte_fallback


def reference_word_indices(tokenizer, ids):
    """The number of words of all ids so far, minus one."""
    previous_ids, words = [], []
    skipped_ids = tokenizer.special_ids - {tokenizer.find_special_id(SpecialToken.UNK)}
    for token_id in ids:
        if token_id not in skipped_ids:
            previous_ids.append(token_id)
        text = tokenizer.decode(previous_ids, skip_special_tokens=False)
        words.append(None if token_id in skipped_ids else max(0, len(text.split()) - 1))
    return words


def check_word_indices(tokenizer, ids):
    ids = [token_id % tokenizer.vocab_size for token_id in ids]
    assert word_indices_of_ids(tokenizer, ids) == reference_word_indices(tokenizer, ids)


@pytest.mark.parametrize("kind", list(TokenizerKind))
@given(ids=any_ids)
def test_word_indices_of_any_ids(kind, ids):
    check_word_indices(trained(kind, SpecialTokenStyle.BERT), ids)


@given(ids=any_ids)
def test_word_indices_of_single_bytes(ids):
    check_word_indices(byte_fallback(), ids)
    check_word_indices(trained(TokenizerKind.BPE, None, 257), ids)


@given(text=st.text())
def test_word_indices_of_any_text(text):
    bpe = trained(TokenizerKind.BPE)
    check_word_indices(bpe, bpe.encode(text))


def test_the_number_of_decoded_tokens_grows_linearly(monkeypatch):
    bpe, decode, n_decoded = trained(TokenizerKind.BPE), Tokenizer.decode, [0]

    def counting_decode(tokenizer, ids, **options):
        n_decoded[0] += len(ids)
        return decode(tokenizer, ids, **options)

    monkeypatch.setattr(Tokenizer, "decode", counting_decode)

    def count_decoded(n):
        n_decoded[0] = 0
        word_indices_of_ids(bpe, bpe.encode("cat " * n))
        return n_decoded[0]

    assert 0 < count_decoded(3_000) <= 10 * count_decoded(300) + 100


def test_a_special_token_in_the_text_has_a_span():
    bert = trained(TokenizerKind.WORDPIECE, SpecialTokenStyle.BERT)
    text = "the [MASK] the"
    ids = bert.encode(text, parse_special_tokens=True)
    spans = token_byte_spans(bert, text, ids, parse_special_tokens=True)
    assert (spans[0], spans[-1]) == (None, None)
    position = ids.index(bert.special_id(SpecialToken.MASK))
    assert text[slice(*spans[position])] == "[MASK]"
    words = word_indices_of_spans(text, spans)
    assert words[position] == 1
    assert words[-2] == 2


def test_whitespace_does_not_belong_to_a_word():
    assert word_indices_of_spans("  ", [(0, 2)]) == [None]
