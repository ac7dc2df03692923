"""A test that waits in vain fails."""

import pytest

from tests.hostile.test_mutated import changed
from tests.waiting import wait_until


def test_what_never_comes_true_is_said():
    with pytest.raises(AssertionError, match=r"after 0\.03 seconds still not so: the sky falls"):
        wait_until(lambda: False, "the sky falls", seconds=0.03)


def test_what_comes_true_is_waited_for():
    answers = iter([False, False, True])
    wait_until(lambda: next(answers), "the third is true")


def test_a_change_that_changes_nothing_is_an_error():
    with pytest.raises(AssertionError, match="no change in 100 tries"):
        changed(b"abc", lambda data, _chance: data, None)
