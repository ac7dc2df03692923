"""Ids, pieces, roles, and what is refused."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.choices import SpecialToken, TokenizerKind
from qkv.errors import InputError
from qkv.text import MAX_CHUNK_CHARACTERS, Tokenizer, split_into_chunks
from qkv.text.rust_errors import convert_rust_errors
from tests.text.samples import TEXTS, trained

KINDS = list(TokenizerKind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_its_texts_one_by_one(kind):
    tokenizer = trained(kind)
    assert tokenizer.encode_batch(TEXTS[:4]) == [tokenizer.encode(text) for text in TEXTS[:4]]
    spelt = [f"a {token} b" for token in tokenizer.special_tokens.values()]
    for parse_special_tokens in (False, True):
        batch = tokenizer.encode_batch(spelt, parse_special_tokens=parse_special_tokens)
        assert batch == [tokenizer.encode(text, parse_special_tokens=parse_special_tokens) for text in spelt]


@given(st.text())
def test_byte_level_pieces_tile_the_text(text):
    pieces = trained(TokenizerKind.BPE).token_spans(text)
    assert [piece.id for piece in pieces] == trained(TokenizerKind.BPE).encode(text)
    assert [piece.start for piece in pieces] == [0, *(piece.end for piece in pieces[:-1])][: len(pieces)]
    assert sum(piece.end - piece.start for piece in pieces) == len(text.encode())


def test_spans_are_bytes_not_characters():
    pieces = trained(TokenizerKind.CHARACTER).token_spans("ñ😀.")
    assert [(piece.start, piece.end) for piece in pieces] == [(0, 2), (2, 6), (6, 7)]
    words = trained(TokenizerKind.WORDPIECE).token_spans("ñ  the")
    assert [(words[0].start, words[0].end), (words[-1].token, words[-1].end)] == [(0, 2), ("the", 7)]


@pytest.mark.parametrize("kind", KINDS)
@given(st.lists(st.sampled_from([*"ab ñ\n'.1", "the", " cat", "😀", "  "]), max_size=60).map("".join))
def test_a_cut_changes_no_token(kind, text):
    tokenizer = trained(kind)
    parts = list(split_into_chunks(text, max_characters=11))
    assert "".join(parts) == text
    # Without a place to cut, the text is cut anyway, and the promise does not hold.
    if all(before[-1].strip() and re.match(r" \S", after) for before, after in pairwise(parts)):
        joined = [number for part in parts for number in tokenizer.encode(part, add_special_tokens=False)]
        assert joined == tokenizer.encode(text, add_special_tokens=False)


def test_a_cut_is_before_a_single_blank():
    assert list(split_into_chunks("one two  three four", max_characters=9)) == ["one", " two  thr", "ee four"]
    assert list(split_into_chunks("x" * 23, max_characters=7)) == ["x" * 7, "x" * 7, "x" * 7, "xx"]
    assert list(split_into_chunks("")) == [""]
    assert len(list(split_into_chunks("a b " * MAX_CHUNK_CHARACTERS))) == 5


def test_a_missing_role_is_named():
    tokenizer = trained(TokenizerKind.BPE)
    assert tokenizer.find_special_id(SpecialToken.MASK) is None
    with pytest.raises(InputError, match=r"no mask_token \(it has: bos_token, eos_token\)"):
        tokenizer.special_id(SpecialToken.MASK)


def test_a_role_that_no_token_can_play_is_refused():
    with pytest.raises(InputError, match=r"pad_token='<none>' is not in the tokenizer's vocabulary"):
        Tokenizer(trained(TokenizerKind.BPE).backend, {SpecialToken.PAD: "<none>"})


def test_half_a_surrogate_pair_is_refused():
    for encode in (trained(TokenizerKind.BPE).encode, trained(TokenizerKind.BPE).token_spans):
        with pytest.raises(InputError, match="character 2 of the text is half a surrogate pair"):
            encode("ab\ud800")


def test_an_id_outside_is_refused():
    tokenizer = trained(TokenizerKind.BPE)
    for number in (-1, tokenizer.vocab_size):
        with pytest.raises(InputError, match=f"id {number} is outside the tokenizer's vocabulary of 401"):
            tokenizer.decode([0, number])


def test_a_panic_leaves_as_one_line():
    class PanicException(BaseException):
        pass

    with pytest.raises(InputError, match=r"^the file: out of range$"), convert_rust_errors("the file"):
        raise PanicException("out of\n   range")
    with pytest.raises(KeyboardInterrupt), convert_rust_errors("the file"):
        raise KeyboardInterrupt
