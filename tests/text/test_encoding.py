"""Rows of one text or two become what BERT reads, whole or cut where that was asked."""

import pytest

from qkv.choices import SpecialToken, SpecialTokenStyle, TokenizerKind
from qkv.text import encode_texts, encode_truncated, train_tokenizer

WORDS = "one two three four five six seven eight nine ten eleven"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TokenizerKind.WORDPIECE, [WORDS] * 9, vocab_size=97, style=SpecialTokenStyle.BERT)


def tokens(tokenizer, encoded):
    return " ".join(tokenizer.id_to_token(number) for number in encoded.ids)


def test_many_rows_are_what_each_is_alone(tokenizer):
    pair, single = encode_texts(tokenizer, [("one two", "three"), ("four",)])
    assert pair == tokenizer.encode_pair("one two", "three")
    assert single.ids == tokenizer.encode("four")
    assert pair.segments == [0, 0, 0, 0, 1, 1]


def test_a_text_is_cut_at_its_end_and_keeps_its_special_tokens(tokenizer):
    assert tokens(tokenizer, encode_truncated(tokenizer, (WORDS,), 5)) == "[CLS] one two three [SEP]"
    assert encode_truncated(tokenizer, ("one two",), 5).ids == tokenizer.encode("one two")


def test_of_a_pair_the_longer_text_is_cut_first(tokenizer):
    cut = encode_truncated(tokenizer, ("one", WORDS), 7)
    assert tokens(tokenizer, cut) == "[CLS] one [SEP] one two three [SEP]"
    assert cut.segments == [0, 0, 0, 1, 1, 1, 1]
    assert (
        tokens(tokenizer, encode_truncated(tokenizer, (WORDS, "nine ten"), 8))
        == "[CLS] one two three [SEP] nine ten [SEP]"
    )
    assert (
        tokens(tokenizer, encode_truncated(tokenizer, (WORDS, WORDS), 8)) == "[CLS] one two [SEP] one two three [SEP]"
    )


def test_a_spelt_special_token_is_one_where_that_is_asked(tokenizer):
    (read,) = encode_texts(tokenizer, [("one [MASK] two",)], parse_special_tokens=True)
    assert tokens(tokenizer, read) == "[CLS] one [MASK] two [SEP]"
    cut = encode_truncated(tokenizer, ("one [MASK] two",), 4, parse_special_tokens=True)
    assert tokens(tokenizer, cut) == "[CLS] one [MASK] [SEP]"
    (plain,) = encode_texts(tokenizer, [("one [MASK] two",)])
    assert tokenizer.special_id(SpecialToken.MASK) not in plain.ids
