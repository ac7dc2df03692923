"""Training, dev and test pairs do not share sentences."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.data.pair_files import connected_components, leakage, normalize_sentence, split_pairs
from qkv.errors import InputError
from tests.data.pair_corpus import reversed_pairs

WORDS = st.sampled_from(["Go!", "go", "¿Qué?", "que", "Sí.", "No.", "yes", "stop", "alto", "a", "b", "c", "?!", "..."])


@pytest.mark.parametrize(("first", "second"), [("¡Ven aquí!", "ven  aquí"), ("It's ME.", "it s me"), ("a_b", "A b")])
def test_normalization_removes_case_and_punctuation(first, second):
    assert normalize_sentence(first) == normalize_sentence(second)


def test_normalization_keeps_accents_and_sentences_of_only_punctuation():
    assert normalize_sentence("sí") != normalize_sentence("si")
    assert normalize_sentence(" ?! ") == "?!"


def test_pairs_that_are_connected_by_shared_sentences_form_a_component():
    pairs = [("uno", "one"), ("Uno.", "a one"), ("dos", "two"), ("un", "a one!"), ("tres", "three"), ("two", "2")]
    components = connected_components(pairs).tolist()
    assert components[0] == components[1] == components[3]
    assert components[2] == components[5]
    assert len({components[0], components[2], components[4]}) == 3


@given(
    pairs=st.lists(st.tuples(WORDS, WORDS), min_size=9, max_size=60), n_dev=st.integers(0, 3), n_test=st.integers(0, 3),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_sets_do_not_share_sentences_and_contain_all_pairs(pairs, n_dev, n_test, seed):
    distinct = [*pairs, *((f"only {i}", f"solo {i}") for i in range(6))]
    parts = split_pairs(distinct, n_dev=n_dev, n_test=n_test, seed=seed)
    assert (len(parts.dev), len(parts.test)) == (n_dev, n_test)
    assert sorted([*parts.train, *parts.dev, *parts.test]) == list(range(len(distinct)))
    sentences = [
        {normalize_sentence(text) for i in part for text in distinct[i]}
        for part in (parts.train, parts.dev, parts.test)
    ]
    for first, second in combinations(sentences, 2):
        assert not first & second


def test_a_random_split_leaks_and_a_split_by_component_does_not():
    pairs = reversed_pairs(400, longest=3)
    parts = split_pairs(pairs, n_dev=0, n_test=100, by_component=False)
    assert leakage(pairs, parts.test, parts.train) > 0.3
    few = reversed_pairs(2000, shortest=5)
    parts = split_pairs(few, n_dev=0, n_test=100)
    assert leakage(few, parts.test, parts.train) == 0.0


def test_the_split_is_determined_by_the_seed():
    pairs = reversed_pairs(300, shortest=5)
    first, again, other = (split_pairs(pairs, n_dev=7, n_test=11, seed=seed).test.tolist() for seed in (0, 0, 1))
    assert first == again != other


def test_sets_are_smaller_if_components_do_not_fit_exactly():
    """Each source has seven translations, as in a collection with several references."""
    pairs = [(f"uno {i}", f"one {i} {j}") for i in range(30) for j in range(7)]
    parts = split_pairs(pairs, n_dev=10, n_test=15)
    assert (len(parts.dev), len(parts.test), len(parts.train)) == (7, 14, 189)
    with pytest.raises(InputError, match=r"\b210 pairs .*\b6 dev .*\b30 .*\b7 pairs"):
        split_pairs(pairs, n_dev=6, n_test=0)


def test_the_error_for_an_impossible_split_contains_the_numbers():
    with pytest.raises(InputError, match=r"\b5 pairs .*\b2 dev .*\b3 test "):
        split_pairs([("a", "b")] * 5, n_dev=2, n_test=3)
    with pytest.raises(InputError, match=r"\b5 pairs .*\b2 dev .*\b1 .*\b5 pairs"):
        split_pairs([("a", "b")] * 5, n_dev=2, n_test=0)
