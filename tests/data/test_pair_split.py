"""No sentence of one part is in another."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.data.pair_split import connected_components, leakage, normalize_sentence, split_pairs
from qkv.errors import InputError
from tests.data.pair_corpus import reversed_pairs

WORDS = st.sampled_from(["Go!", "go", "¿Qué?", "que", "Sí.", "No.", "yes", "stop", "alto", "a", "b", "c", "?!", "..."])


@pytest.mark.parametrize(("one", "other"), [("¡Ven aquí!", "ven  aquí"), ("It's ME.", "it s me"), ("a_b", "A b")])
def test_capitals_and_punctuation_are_folded(one, other):
    assert normalize_sentence(one) == normalize_sentence(other)


def test_accents_are_not_folded_and_what_is_punctuation_alone_stays():
    assert normalize_sentence("sí") != normalize_sentence("si")
    assert normalize_sentence(" ?! ") == "?!"


def test_pairs_that_share_a_sentence_by_a_chain_are_one_component():
    pairs = [("uno", "one"), ("Uno.", "a one"), ("dos", "two"), ("un", "a one!"), ("tres", "three"), ("two", "2")]
    numbers = connected_components(pairs).tolist()
    assert numbers[0] == numbers[1] == numbers[3]
    assert numbers[2] == numbers[5]
    assert len({numbers[0], numbers[2], numbers[4]}) == 3


@given(
    pairs=st.lists(st.tuples(WORDS, WORDS), min_size=9, max_size=60), n_dev=st.integers(0, 3), n_test=st.integers(0, 3),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_no_sentence_of_one_part_is_in_another_and_nothing_is_lost(pairs, n_dev, n_test, seed):
    distinct = [*pairs, *((f"only {i}", f"solo {i}") for i in range(6))]
    parts = split_pairs(distinct, n_dev=n_dev, n_test=n_test, seed=seed)
    assert (len(parts.dev), len(parts.test)) == (n_dev, n_test)
    assert sorted([*parts.train, *parts.dev, *parts.test]) == list(range(len(distinct)))
    sentences = [
        {normalize_sentence(text) for i in part for text in distinct[i]}
        for part in (parts.train, parts.dev, parts.test)
    ]
    for one, other in combinations(sentences, 2):
        assert not one & other


def test_a_random_split_leaks_and_says_so():
    pairs = reversed_pairs(400, longest=3)
    parts = split_pairs(pairs, n_dev=0, n_test=100, by_component=False)
    assert leakage(pairs, parts.test, parts.train) > 0.3
    few = reversed_pairs(2000, shortest=5)
    parts = split_pairs(few, n_dev=0, n_test=100)
    assert leakage(few, parts.test, parts.train) == 0.0


def test_another_seed_is_another_split_and_the_same_the_same():
    pairs = reversed_pairs(300, shortest=5)
    first, again, other = (split_pairs(pairs, n_dev=7, n_test=11, seed=seed).test.tolist() for seed in (0, 0, 1))
    assert first == again != other


def test_where_components_do_not_fit_exactly_a_part_is_a_little_smaller():
    """Each source with seven translations, as in a collection of several references."""
    pairs = [(f"uno {i}", f"one {i} {j}") for i in range(30) for j in range(7)]
    parts = split_pairs(pairs, n_dev=10, n_test=15)
    assert (len(parts.dev), len(parts.test), len(parts.train)) == (7, 14, 189)
    with pytest.raises(InputError, match="30 components, the largest of 7 pairs: not even half of 6 for dev"):
        split_pairs(pairs, n_dev=6, n_test=0)


def test_what_cannot_be_had_is_refused_with_the_numbers():
    with pytest.raises(InputError, match="5 pairs cannot give 2 for dev and 3 for test"):
        split_pairs([("a", "b")] * 5, n_dev=2, n_test=3)
    with pytest.raises(InputError, match="5 pairs fall into 1 components, the largest of 5 pairs"):
        split_pairs([("a", "b")] * 5, n_dev=2, n_test=0)
