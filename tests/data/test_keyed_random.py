"""Keyed permutations are bijections, uniform and different for each key."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.data.sampler import Permutation, keyed_integer
from qkv.errors import ConfigError


@given(n=st.integers(1, 3000), key=st.tuples(st.integers(0, 2**64), st.integers(0, 10)))
def test_a_permutation_is_a_bijection(n, key):
    values = Permutation(n, *key)(np.arange(n))
    assert np.array_equal(np.sort(values), np.arange(n))


@given(n=st.integers(2**40, 2**62), start=st.integers(0, 2**39))
def test_values_of_huge_permutations_are_distinct_and_in_range(n, start):
    values = Permutation(n, 7)(np.arange(start, start + 997))
    assert len(np.unique(values)) == 997
    assert 0 <= values.min() <= values.max() < n


@given(n=st.integers(2, 500), split=st.integers(0, 500))
def test_the_value_of_an_index_does_not_depend_on_the_other_indices(n, split):
    order, indices = Permutation(n, 3, 1), np.arange(n)
    parts = [order(indices[:split]), order(indices[split:])]
    assert np.array_equal(np.concatenate(parts), order(indices))


@pytest.mark.parametrize("n", [2, 3, 5, 7, 13])
def test_all_values_are_equally_likely_over_many_keys(n):
    n_keys = 200 * n
    counts = np.zeros((n, n))
    for key in range(n_keys):
        counts[np.arange(n), Permutation(n, key, 0)(np.arange(n))] += 1
    chi_squared = ((counts - 200) ** 2 / 200).sum()
    freedom = (n - 1) ** 2
    assert abs(chi_squared - freedom) < 5 * np.sqrt(2 * freedom)


def test_values_of_adjacent_indices_are_uncorrelated():
    n = 100_003
    values = Permutation(n, 0, 0)(np.arange(n))
    steps = np.abs(np.diff(values))
    assert abs(steps.mean() / n - 1 / 3) < 0.01  # the mean distance of two independent uniform values
    assert abs(np.corrcoef(np.arange(n), values)[0, 1]) < 0.02


def test_different_keys_have_different_permutations():
    first, second = (Permutation(10_007, 5, epoch)(np.arange(10_007)) for epoch in (0, 1))
    assert (first == second).sum() < 10  # one equal value is expected by chance


def test_a_permutation_of_a_trillion_takes_little_memory():
    tracemalloc.start()
    Permutation(10**12, 1)(np.arange(64))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_keyed_integers_are_uniform():
    counts = np.bincount([keyed_integer(7, seed, 1) for seed in range(7000)], minlength=7)
    assert ((counts - 1000) ** 2 / 1000).sum() < 25


def test_invalid_sizes_and_indices_are_errors():
    with pytest.raises(ConfigError, match=r"\bn=0\b"):
        Permutation(0, 1)
    with pytest.raises(ConfigError, match=r"\b0 to 7\b.*\b7\b"):
        Permutation(7, 1)(np.arange(8))
