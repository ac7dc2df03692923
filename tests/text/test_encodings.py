"""Texts and text pairs are encoded in batches and truncated."""

import pytest

from qkv.choices import SpecialToken, SpecialTokenStyle, TokenizerKind
from qkv.text import encode_texts, encode_truncated, train_tokenizer

WORDS = "one two three four five six seven eight nine ten eleven"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TokenizerKind.WORDPIECE, [WORDS] * 9, vocab_size=97, style=SpecialTokenStyle.BERT)


def tokens(tokenizer, encoding):
    return " ".join(tokenizer.id_to_token(token_id) for token_id in encoding.ids)


def test_a_batch_equals_its_rows_encoded_one_by_one(tokenizer):
    pair, single = encode_texts(tokenizer, [("one two", "three"), ("four",)])
    assert pair == tokenizer.encode_pair("one two", "three")
    assert single.ids == tokenizer.encode("four")
    assert pair.segments == [0, 0, 0, 0, 1, 1]


def test_truncation_keeps_the_start_of_a_text_and_the_special_tokens(tokenizer):
    assert tokens(tokenizer, encode_truncated(tokenizer, (WORDS,), 5)) == "[CLS] one two three [SEP]"
    assert encode_truncated(tokenizer, ("one two",), 5).ids == tokenizer.encode("one two")


def test_the_longer_text_of_a_pair_is_truncated_first(tokenizer):
    truncated = encode_truncated(tokenizer, ("one", WORDS), 7)
    assert tokens(tokenizer, truncated) == "[CLS] one [SEP] one two three [SEP]"
    assert truncated.segments == [0, 0, 0, 1, 1, 1, 1]
    assert (
        tokens(tokenizer, encode_truncated(tokenizer, (WORDS, "nine ten"), 8))
        == "[CLS] one two three [SEP] nine ten [SEP]"
    )
    assert (
        tokens(tokenizer, encode_truncated(tokenizer, (WORDS, WORDS), 8)) == "[CLS] one two [SEP] one two three [SEP]"
    )


def test_special_tokens_in_a_text_are_parsed_on_request(tokenizer):
    (parsed,) = encode_texts(tokenizer, [("one [MASK] two",)], parse_special_tokens=True)
    assert tokens(tokenizer, parsed) == "[CLS] one [MASK] two [SEP]"
    truncated = encode_truncated(tokenizer, ("one [MASK] two",), 4, parse_special_tokens=True)
    assert tokens(tokenizer, truncated) == "[CLS] one [MASK] [SEP]"
    (plain,) = encode_texts(tokenizer, [("one [MASK] two",)])
    assert tokenizer.special_id(SpecialToken.MASK) not in plain.ids
