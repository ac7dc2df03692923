"""The order is a bijection, another one for each key, and even."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.data.keyed_random import Permutation, keyed_integer
from qkv.errors import ConfigError


@given(n=st.integers(1, 3000), key=st.tuples(st.integers(0, 2**64), st.integers(0, 10)))
def test_every_index_goes_to_its_own_place(n, key):
    places = Permutation(n, *key)(np.arange(n))
    assert np.array_equal(np.sort(places), np.arange(n))


@given(n=st.integers(2**40, 2**62), start=st.integers(0, 2**39))
def test_huge_orders_keep_apart_and_inside(n, start):
    places = Permutation(n, 7)(np.arange(start, start + 997))
    assert len(np.unique(places)) == 997
    assert 0 <= places.min() <= places.max() < n


@given(n=st.integers(2, 500), split=st.integers(0, 500))
def test_an_index_goes_where_it_goes_whoever_is_beside_it(n, split):
    order, indices = Permutation(n, 3, 1), np.arange(n)
    parts = [order(indices[:split]), order(indices[split:])]
    assert np.array_equal(np.concatenate(parts), order(indices))


@pytest.mark.parametrize("n", [2, 3, 5, 7, 13])
def test_over_many_keys_every_place_is_equally_likely(n):
    n_keys = 200 * n
    counts = np.zeros((n, n))
    for key in range(n_keys):
        counts[np.arange(n), Permutation(n, key, 0)(np.arange(n))] += 1
    chi_squared = ((counts - 200) ** 2 / 200).sum()
    freedom = (n - 1) ** 2
    assert abs(chi_squared - freedom) < 5 * np.sqrt(2 * freedom)


def test_neighbours_are_sent_far_apart():
    n = 100_003
    places = Permutation(n, 0, 0)(np.arange(n))
    steps = np.abs(np.diff(places))
    assert abs(steps.mean() / n - 1 / 3) < 0.01  # of two independent even draws
    assert abs(np.corrcoef(np.arange(n), places)[0, 1]) < 0.02


def test_two_keys_are_two_orders():
    first, second = (Permutation(10_007, 5, epoch)(np.arange(10_007)) for epoch in (0, 1))
    assert (first == second).sum() < 10  # one place in 10,007 by chance


def test_a_permutation_of_a_trillion_takes_little_memory():
    tracemalloc.start()
    Permutation(10**12, 1)(np.arange(64))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_an_integer_by_key_is_even():
    drawn = np.bincount([keyed_integer(7, seed, 1) for seed in range(7000)], minlength=7)
    assert ((drawn - 1000) ** 2 / 1000).sum() < 25


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="n=0 values"):
        Permutation(0, 1)
    with pytest.raises(ConfigError, match="indices 0 to 7 of a permutation of 7 values"):
        Permutation(7, 1)(np.arange(8))
