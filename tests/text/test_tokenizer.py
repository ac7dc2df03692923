"""Encoding, byte spans, special tokens and errors of tokenizers."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.choices import SpecialToken, TokenizerKind
from qkv.errors import InputError
from qkv.text import MAX_CHUNK_CHARACTERS, Tokenizer, split_into_chunks
from qkv.text.tokenizer import convert_errors_to_input_error
from tests.text.samples import TEXTS, trained

KINDS = list(TokenizerKind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_equals_its_texts_encoded_one_by_one(kind):
    tokenizer = trained(kind)
    assert tokenizer.encode_batch(TEXTS[:4]) == [tokenizer.encode(text) for text in TEXTS[:4]]
    texts = [f"a {token} b" for token in tokenizer.special_tokens.values()]
    for parse_special_tokens in (False, True):
        batch = tokenizer.encode_batch(texts, parse_special_tokens=parse_special_tokens)
        assert batch == [tokenizer.encode(text, parse_special_tokens=parse_special_tokens) for text in texts]


@given(st.text())
def test_byte_level_spans_cover_the_text_without_gaps(text):
    spans = trained(TokenizerKind.BPE).token_spans_without_template(text)
    assert [span.id for span in spans] == trained(TokenizerKind.BPE).encode(text)
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])][: len(spans)]
    assert sum(span.end - span.start for span in spans) == len(text.encode())


def test_spans_count_bytes_instead_of_characters():
    spans = trained(TokenizerKind.CHARACTER).token_spans_without_template("ñ😀.")
    assert [(span.start, span.end) for span in spans] == [(0, 2), (2, 6), (6, 7)]
    words = trained(TokenizerKind.WORDPIECE).token_spans_without_template("ñ  the")
    assert [(words[0].start, words[0].end), (words[-1].token, words[-1].end)] == [(0, 2), ("the", 7)]


@pytest.mark.parametrize("kind", KINDS)
@given(st.lists(st.sampled_from([*"ab ñ\n'.1", "the", " cat", "😀", "  "]), max_size=60).map("".join))
def test_splitting_at_split_points_does_not_change_tokens(kind, text):
    tokenizer = trained(kind)
    chunks = list(split_into_chunks(text, max_characters=11))
    assert "".join(chunks) == text
    # Without a split point, the text is split anyway and the tokens may change.
    if all(before[-1].strip() and re.match(r" \S", after) for before, after in pairwise(chunks)):
        ids = [token_id for chunk in chunks for token_id in tokenizer.encode(chunk, add_special_tokens=False)]
        assert ids == tokenizer.encode(text, add_special_tokens=False)


def test_texts_are_split_before_single_spaces():
    assert list(split_into_chunks("one two  three four", max_characters=9)) == ["one", " two  thr", "ee four"]
    assert list(split_into_chunks("x" * 23, max_characters=7)) == ["x" * 7, "x" * 7, "x" * 7, "xx"]
    assert list(split_into_chunks("")) == [""]
    assert len(list(split_into_chunks("a b " * MAX_CHUNK_CHARACTERS))) == 5


def test_the_error_for_a_missing_special_token_contains_its_role():
    tokenizer = trained(TokenizerKind.BPE)
    assert tokenizer.find_special_id(SpecialToken.MASK) is None
    with pytest.raises(InputError, match=r"mask_token.*bos_token, eos_token"):
        tokenizer.special_id(SpecialToken.MASK)


def test_a_special_token_outside_the_vocabulary_is_an_error():
    with pytest.raises(InputError, match=r"pad_token='<none>'"):
        Tokenizer(trained(TokenizerKind.BPE).backend, {SpecialToken.PAD: "<none>"})


def test_an_unpaired_surrogate_is_an_error():
    for encode in (trained(TokenizerKind.BPE).encode, trained(TokenizerKind.BPE).token_spans_without_template):
        with pytest.raises(InputError, match=r"character 2 .*surrogate"):
            encode("ab\ud800")


def test_an_id_outside_the_vocabulary_is_an_error():
    tokenizer = trained(TokenizerKind.BPE)
    for token_id in (-1, tokenizer.vocab_size):
        with pytest.raises(InputError, match=rf"id {token_id} .*\b401\b"):
            tokenizer.decode([0, token_id])


def test_a_rust_panic_is_converted_to_a_one_line_error():
    class PanicException(BaseException):
        pass

    with pytest.raises(InputError, match=r"^the file: out of range$"), convert_errors_to_input_error("the file"):
        raise PanicException("out of\n   range")
    with pytest.raises(KeyboardInterrupt), convert_errors_to_input_error("the file"):
        raise KeyboardInterrupt
