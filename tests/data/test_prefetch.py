"""Prefetched batches are in order, and the workers stop when the generator is closed."""

import threading

import pytest

from qkv.data import prefetch


@pytest.mark.parametrize("n_workers", [1, 2, 4])
def test_batches_are_in_order(n_workers):
    """With several workers, each even batch is finished after the odd batch that follows it."""
    ready = {t: threading.Event() for t in range(3, 24)}

    def finish_even_batches_late(t):
        if n_workers > 1 and t % 2 == 0:
            assert ready[t + 1].wait(60)
        ready[t].set()
        return t

    assert list(prefetch(finish_even_batches_late, 3, stop=24, n_ahead=5, n_workers=n_workers)) == list(range(3, 24))


def test_only_n_ahead_batches_are_prefetched_and_workers_stop():
    prepared = []
    batches = prefetch(lambda t: prepared.append(t) or t, 0, n_ahead=3)
    assert next(batches) == 0
    assert next(batches) == 1
    batches.close()
    assert set(prepared) <= set(range(5))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_an_exception_is_raised_for_its_own_batch():
    def fail_at_two(t):
        if t == 2:
            raise ValueError("two")
        return t

    batches = prefetch(fail_at_two, 0, n_ahead=4)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(ValueError, match="two"):
        next(batches)
