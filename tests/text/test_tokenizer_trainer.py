"""Trained tokenizers restore their texts, apply their templates, and do not parse special tokens in texts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.choices import SpecialToken, SpecialTokenStyle, TokenizerKind
from qkv.errors import ConfigError, InputError
from qkv.text import END_OF_TEXT, train_tokenizer
from tests.text.samples import TEXTS, trained

KINDS = list(TokenizerKind)
LOSSLESS = [TokenizerKind.BPE, TokenizerKind.UNIGRAM, TokenizerKind.CHARACTER]
STYLES = list(SpecialTokenStyle)


@pytest.mark.parametrize("kind", LOSSLESS)
def test_training_texts_survive_encoding_and_decoding(kind):
    for text in TEXTS[:4]:
        assert trained(kind).decode(trained(kind).encode(text)) == text


def test_wordpiece_restores_words():
    tokenizer = trained(TokenizerKind.WORDPIECE)
    assert tokenizer.decode(tokenizer.encode("The cat sat on the mat.")) == "The cat sat on the mat."


@given(st.text())
def test_any_text_survives_byte_level_encoding_and_decoding(text):
    tokenizer = trained(TokenizerKind.BPE)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", KINDS)
def test_the_vocabulary_does_not_exceed_the_requested_size(kind):
    tokenizer = trained(kind)
    assert 50 < tokenizer.vocab_size <= 401
    assert tokenizer.vocab_size == len(tokenizer.backend.get_vocab())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", STYLES)
def test_special_tokens_in_a_text_are_only_parsed_on_request(kind, style):
    tokenizer = trained(kind, style)
    special_ids = tokenizer.special_ids - {tokenizer.find_special_id(SpecialToken.UNK)}
    for spelling in tokenizer.special_tokens.values():
        plain = tokenizer.encode(f"a {spelling} b{spelling}", add_special_tokens=False)
        assert not special_ids & set(plain)
        if spelling != tokenizer.special_tokens.get(SpecialToken.UNK):
            token_id = tokenizer.backend.token_to_id(spelling)
            parsed = tokenizer.encode(f"a {spelling} b{spelling}", add_special_tokens=False, parse_special_tokens=True)
            assert parsed.count(token_id) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_bert_pairs_have_special_tokens_and_segments(kind):
    tokenizer = trained(kind, SpecialTokenStyle.BERT)
    cls_id, sep_id = tokenizer.special_id(SpecialToken.CLS), tokenizer.special_id(SpecialToken.SEP)
    first, second = (tokenizer.encode(text, add_special_tokens=False) for text in ("the cat", "a dog sat"))
    pair = tokenizer.encode_pair("the cat", "a dog sat")
    assert pair.ids == [cls_id, *first, sep_id, *second, sep_id]
    assert pair.segments == [0] * (len(first) + 2) + [1] * (len(second) + 1)
    assert tokenizer.encode("the cat") == [cls_id, *first, sep_id]


@pytest.mark.parametrize("kind", KINDS)
def test_seq2seq_texts_have_bos_and_eos(kind):
    tokenizer = trained(kind, SpecialTokenStyle.SEQ2SEQ)
    plain = tokenizer.encode("the cat", add_special_tokens=False)
    assert tokenizer.encode("the cat") == [
        tokenizer.special_id(SpecialToken.BOS),
        *plain,
        tokenizer.special_id(SpecialToken.EOS),
    ]


def test_gpt_texts_have_no_special_tokens():
    tokenizer = trained(TokenizerKind.BPE)
    assert tokenizer.encode("the cat") == tokenizer.encode("the cat", add_special_tokens=False)
    assert tokenizer.id_to_token(tokenizer.special_id(SpecialToken.EOS)) == END_OF_TEXT
    assert tokenizer.special_id(SpecialToken.BOS) == tokenizer.special_id(SpecialToken.EOS)


@pytest.mark.parametrize("kind", KINDS)
def test_lowercase_tokenizers_ignore_case(kind):
    tokenizer = train_tokenizer(kind, TEXTS, vocab_size=401, lowercase=True)
    assert tokenizer.encode("THE Cat") == tokenizer.encode("the cat")


def test_a_character_outside_the_vocabulary_is_unknown():
    tokenizer = trained(TokenizerKind.CHARACTER)
    assert tokenizer.encode("ж") == [tokenizer.special_id(SpecialToken.UNK)]


def test_the_rarest_characters_are_dropped_from_a_small_vocabulary():
    tokenizer = train_tokenizer(TokenizerKind.CHARACTER, ["aaab", "bbc"], vocab_size=4)
    assert tokenizer.decode(tokenizer.encode("abc")) == "ab"


def test_splitting_a_long_text_does_not_change_the_tokenizer():
    texts = [" ".join(TEXTS)]
    tokenizer = train_tokenizer(TokenizerKind.BPE, texts * 300, vocab_size=300)
    from_long_text = train_tokenizer(TokenizerKind.BPE, [" ".join(texts * 300)], vocab_size=300)
    assert tokenizer.backend.to_str() == from_long_text.backend.to_str()


@pytest.mark.parametrize("kind", [TokenizerKind.BPE, TokenizerKind.CHARACTER])
def test_training_is_deterministic(kind):
    first, second = (train_tokenizer(kind, TEXTS, vocab_size=401) for _ in range(2))
    assert first.backend.to_str() == second.backend.to_str()
    assert first.fingerprint == second.fingerprint


def test_the_error_for_a_small_vocabulary_contains_the_minimum_size():
    with pytest.raises(ConfigError, match=r"vocab_size=256 .*bpe .*\b257\b"):
        train_tokenizer(TokenizerKind.BPE, TEXTS, vocab_size=256)
    with pytest.raises(InputError, match=r"unigram .*vocab_size=17: .*chars"):
        train_tokenizer(TokenizerKind.UNIGRAM, TEXTS, vocab_size=17)


@pytest.mark.parametrize("kind", KINDS)
def test_training_without_text_is_an_error(kind):
    with pytest.raises(InputError, match="text"):
        train_tokenizer(kind, [""], vocab_size=300)


def test_with_a_prefix_space_the_ids_of_concatenated_sentences_are_concatenated():
    tokenizer = train_tokenizer(
        TokenizerKind.BPE, TEXTS, vocab_size=401, style=SpecialTokenStyle.SEQ2SEQ, add_prefix_space=True
    )
    first, second = "¿Dónde está?", "Here he is. ñ😀"
    first_ids, second_ids, both_ids = (
        tokenizer.encode(text, add_special_tokens=False) for text in (first, second, f"{first} {second}")
    )
    assert both_ids == first_ids + second_ids
    assert [tokenizer.decode(ids) for ids in (first_ids, both_ids)] == [first, f"{first} {second}"]
    spans = tokenizer.token_spans_without_template(first)
    assert (spans[0].start, spans[-1].end) == (0, len(first.encode()))
