"""Merges made from scores join as scores do: always the two neighbours whose piece has the best score."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.choices import SpecialToken
from qkv.errors import WeightsError
from qkv.weights.llama2c import read_tokenizer
from qkv.weights.sentencepiece import SentencePieceVocab, build_sentencepiece_tokenizer
from tests.text.samples import published
from tests.weights.loaded_models import scored_pieces

TEXT = "One day, Lily's mom said: the cat sat on the mat. They went to the park, and then the dog ran away! Été 😀"


def by_scores(text, tokens, scores):
    """SentencePiece's rule, one join at a time."""
    ids = {token: number for number, token in enumerate(tokens)}
    pieces = []
    for character in "▁" + text.replace(" ", "▁"):
        pieces += [character] if character in ids else [f"<0x{byte:02X}>" for byte in character.encode()]
    while True:
        joins = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in ids]
        if not joins:
            return [ids[piece] for piece in pieces]
        _, i = min(joins)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


@given(st.text(alphabet="thecatsñ ", min_size=1, max_size=30))
def test_any_text_is_cut_as_the_scores_say(text):
    tokenizer = scored_pieces()
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.vocab_size)]
    scores = [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)]
    assert tokenizer.encode(text, add_special_tokens=False) == by_scores(text, tokens, scores)


def test_a_real_vocabulary_cuts_as_its_scores_say():
    tokenizer = read_tokenizer(published("tok512.bin"), vocab_size=512)
    tokens = [tokenizer.id_to_token(i) for i in range(512)]
    # Its scores fall with the ids, as SentencePiece writes them.
    assert tokenizer.encode(TEXT, add_special_tokens=False) == by_scores(TEXT, tokens, [-float(i) for i in range(512)])


def test_llama2c_ends_a_text_where_the_next_begins():
    tokenizer = read_tokenizer(published("tok512.bin"), vocab_size=512)
    assert (tokenizer.find_special_id(SpecialToken.BOS), tokenizer.find_special_id(SpecialToken.EOS)) == (1, 1)


def test_two_pieces_of_one_spelling_are_refused():
    with pytest.raises(WeightsError, match="names 3 pieces, but only 2 differ"):
        build_sentencepiece_tokenizer(SentencePieceVocab(tokens=["a", "b", "a"], scores=[0.0] * 3, control_ids=frozenset(), special_ids={}))
