"""Merges derived from scores equal the SentencePiece algorithm, which merges the pair with the best score."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.choices import SpecialToken
from qkv.errors import WeightsError
from qkv.weights.llama2c import read_llama2c_tokenizer
from qkv.weights.sentencepiece import SentencePieceVocab, build_sentencepiece_tokenizer
from tests.text.samples import published
from tests.weights.loaded_models import sentencepiece_tokenizer

TEXT = "One day, Lily's mom said: the cat sat on the mat. They went to the park, and then the dog ran away! Été 😀"


def encode_by_scores(text, tokens, scores):
    """Slow reference of the SentencePiece algorithm, one merge at a time."""
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    parts = []
    for character in "▁" + text.replace(" ", "▁"):
        parts += [character] if character in ids else [f"<0x{byte:02X}>" for byte in character.encode()]
    while True:
        merges = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
        if not merges:
            return [ids[part] for part in parts]
        _, i = min(merges)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@given(st.text(alphabet="thecatsñ ", min_size=1, max_size=30))
def test_any_text_is_merged_by_scores(text):
    tokenizer = sentencepiece_tokenizer()
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.vocab_size)]
    scores = [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)]
    assert tokenizer.encode(text, add_special_tokens=False) == encode_by_scores(text, tokens, scores)


def test_a_published_vocabulary_is_merged_by_scores():
    tokenizer = read_llama2c_tokenizer(published("tok512.bin"), vocab_size=512)
    tokens = [tokenizer.id_to_token(i) for i in range(512)]
    # The scores decrease with the ids, as in all files of SentencePiece.
    assert tokenizer.encode(TEXT, add_special_tokens=False) == encode_by_scores(
        TEXT, tokens, [-float(i) for i in range(512)]
    )


def test_llama2c_uses_bos_as_eos():
    tokenizer = read_llama2c_tokenizer(published("tok512.bin"), vocab_size=512)
    assert (tokenizer.find_special_id(SpecialToken.BOS), tokenizer.find_special_id(SpecialToken.EOS)) == (1, 1)


def test_duplicate_tokens_are_rejected():
    with pytest.raises(WeightsError, match=r"\b3 tokens.*\b2\b"):
        build_sentencepiece_tokenizer(
            SentencePieceVocab(tokens=["a", "b", "a"], scores=[0.0] * 3, control_ids=frozenset(), special_ids={})
        )
