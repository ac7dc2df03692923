"""Batches made ahead come in order, and the workers end with their reader."""

import threading

import pytest

from qkv.data import prefetch


@pytest.mark.parametrize("n_workers", [1, 2, 4])
def test_batches_come_in_order(n_workers):
    """With several workers, every even batch is ready only after the odd one that follows it."""
    ready = {t: threading.Event() for t in range(3, 24)}

    def later_at_even(t):
        if n_workers > 1 and t % 2 == 0:
            assert ready[t + 1].wait(60)
        ready[t].set()
        return t

    assert list(prefetch(later_at_even, 3, stop=24, n_ahead=5, n_workers=n_workers)) == list(range(3, 24))


def test_no_more_are_made_than_asked_and_none_after_the_end():
    made = []
    batches = prefetch(lambda t: made.append(t) or t, 0, n_ahead=3)
    assert next(batches) == 0
    assert next(batches) == 1
    batches.close()
    assert set(made) <= set(range(5))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_an_error_comes_at_its_own_place():
    def bad_at_two(t):
        if t == 2:
            raise ValueError("two")
        return t

    batches = prefetch(bad_at_two, 0, n_ahead=4)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(ValueError, match="two"):
        next(batches)
