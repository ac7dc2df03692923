"""A trained tokenizer gives its text back, keeps its special tokens, and reads no control token out of text."""

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
def test_the_text_it_was_trained_on_comes_back(kind):
    for text in TEXTS[:4]:
        assert trained(kind).decode(trained(kind).encode(text)) == text


def test_wordpiece_gives_the_words_back():
    tokenizer = trained(TokenizerKind.WORDPIECE)
    assert tokenizer.decode(tokenizer.encode("The cat sat on the mat.")) == "The cat sat on the mat."


@given(st.text())
def test_any_text_comes_back_from_bytes(text):
    tokenizer = trained(TokenizerKind.BPE)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", KINDS)
def test_the_vocabulary_is_no_larger_than_asked(kind):
    tokenizer = trained(kind)
    assert 50 < tokenizer.vocab_size <= 401
    assert tokenizer.vocab_size == len(tokenizer.backend.get_vocab())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", STYLES)
def test_no_text_spells_a_control_token(kind, style):
    tokenizer = trained(kind, style)
    controls = tokenizer.special_ids - {tokenizer.find_special_id(SpecialToken.UNK)}
    for spelling in tokenizer.special_tokens.values():
        plain = tokenizer.encode(f"a {spelling} b{spelling}", add_special_tokens=False)
        assert not controls & set(plain)
        if spelling != tokenizer.special_tokens.get(SpecialToken.UNK):
            number = tokenizer.backend.token_to_id(spelling)
            asked = tokenizer.encode(f"a {spelling} b{spelling}", add_special_tokens=False, parse_special_tokens=True)
            assert asked.count(number) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_bert_pair_has_its_template_and_segments(kind):
    tokenizer = trained(kind, SpecialTokenStyle.BERT)
    classify, separate = tokenizer.special_id(SpecialToken.CLS), tokenizer.special_id(SpecialToken.SEP)
    first, second = (tokenizer.encode(text, add_special_tokens=False) for text in ("the cat", "a dog sat"))
    pair = tokenizer.encode_pair("the cat", "a dog sat")
    assert pair.ids == [classify, *first, separate, *second, separate]
    assert pair.segments == [0] * (len(first) + 2) + [1] * (len(second) + 1)
    assert tokenizer.encode("the cat") == [classify, *first, separate]


@pytest.mark.parametrize("kind", KINDS)
def test_a_seq2seq_text_begins_and_ends(kind):
    tokenizer = trained(kind, SpecialTokenStyle.SEQ2SEQ)
    plain = tokenizer.encode("the cat", add_special_tokens=False)
    assert tokenizer.encode("the cat") == [
        tokenizer.special_id(SpecialToken.BOS),
        *plain,
        tokenizer.special_id(SpecialToken.EOS),
    ]


def test_a_gpt_text_has_nothing_around_it():
    tokenizer = trained(TokenizerKind.BPE)
    assert tokenizer.encode("the cat") == tokenizer.encode("the cat", add_special_tokens=False)
    assert tokenizer.id_to_token(tokenizer.special_id(SpecialToken.EOS)) == END_OF_TEXT
    assert tokenizer.special_id(SpecialToken.BOS) == tokenizer.special_id(SpecialToken.EOS)


@pytest.mark.parametrize("kind", KINDS)
def test_lowercase_holds_in_training_and_in_use(kind):
    tokenizer = train_tokenizer(kind, TEXTS, vocab_size=401, lowercase=True)
    assert tokenizer.encode("THE Cat") == tokenizer.encode("the cat")


def test_an_unseen_character_is_unknown():
    tokenizer = trained(TokenizerKind.CHARACTER)
    assert tokenizer.encode("ж") == [tokenizer.special_id(SpecialToken.UNK)]


def test_characters_beyond_the_size_are_the_rare_ones():
    tokenizer = train_tokenizer(TokenizerKind.CHARACTER, ["aaab", "bbc"], vocab_size=4)
    assert tokenizer.decode(tokenizer.encode("abc")) == "ab"


def test_a_long_text_is_cut_and_trains_the_same():
    texts = [" ".join(TEXTS)]
    tokenizer = train_tokenizer(TokenizerKind.BPE, texts * 300, vocab_size=300)
    whole = train_tokenizer(TokenizerKind.BPE, [" ".join(texts * 300)], vocab_size=300)
    assert tokenizer.backend.to_str() == whole.backend.to_str()


@pytest.mark.parametrize("kind", [TokenizerKind.BPE, TokenizerKind.CHARACTER])
def test_training_twice_gives_the_same_bytes(kind):
    first, second = (train_tokenizer(kind, TEXTS, vocab_size=401) for _ in range(2))
    assert first.backend.to_str() == second.backend.to_str()
    assert first.fingerprint == second.fingerprint


def test_too_small_a_vocabulary_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"vocab_size=256 is too small: bpe .* needs 257"):
        train_tokenizer(TokenizerKind.BPE, TEXTS, vocab_size=256)
    with pytest.raises(InputError, match=r"a unigram tokenizer of 17 cannot be trained on this text: .*chars"):
        train_tokenizer(TokenizerKind.UNIGRAM, TEXTS, vocab_size=17)


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_is_refused(kind):
    with pytest.raises(InputError, match="no text to train a tokenizer on"):
        train_tokenizer(kind, [""], vocab_size=300)


def test_spaced_the_ids_of_two_sentences_are_those_of_each():
    tokenizer = train_tokenizer(TokenizerKind.BPE, TEXTS, vocab_size=401, style=SpecialTokenStyle.SEQ2SEQ, spaced=True)
    first, second = "¿Dónde está?", "Here he is. ñ😀"
    one, other, both = (tokenizer.encode(t, add_special_tokens=False) for t in (first, second, f"{first} {second}"))
    assert both == one + other
    assert [tokenizer.decode(ids) for ids in (one, both)] == [first, f"{first} {second}"]
    pieces = tokenizer.token_spans(first)
    assert (pieces[0].start, pieces[-1].end) == (0, len(first.encode()))
