"""Waiting for a condition that never becomes true fails."""

import pytest

from tests.hostile.test_mutated_files import mutate_until_different
from tests.timeouts import wait_until


def test_a_condition_that_stays_false_is_an_error():
    with pytest.raises(AssertionError, match=r"0\.03 .*the sky falls"):
        wait_until(lambda: False, "the sky falls", seconds=0.03)


def test_a_condition_that_becomes_true_ends_the_waiting():
    answers = iter([False, False, True])
    wait_until(lambda: next(answers), "the third is true")


def test_a_mutation_without_effect_is_an_error():
    with pytest.raises(AssertionError, match="100"):
        mutate_until_different(b"abc", lambda data, _generator: data, None)
