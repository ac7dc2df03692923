"""Tests of taps: identity, observers and interventions."""

import torch

from qkv.nn import Tap

X = torch.tensor([1.0, 2.0])


def test_a_tap_returns_the_same_object():
    tap, anything = Tap(), object()
    assert tap(X) is X
    assert tap(anything) is anything
    assert not tap.has_observers
    assert not tap.has_interventions


def test_an_observer_is_called_until_it_is_removed():
    tap, seen = Tap(), []
    end = tap.observe(seen.append)
    assert tap.has_observers
    assert tap(X) is X
    end()
    tap(X * 2)
    assert len(seen) == 1
    assert seen[0] is X
    assert not tap.has_observers


def test_interventions_run_in_order_before_the_observers():
    tap, seen = Tap(), []
    tap.observe(seen.append)
    end_double = tap.intervene(lambda x: x * 2)
    end_add = tap.intervene(lambda x: x + 1)
    assert tap.has_interventions
    assert tap(X).tolist() == [3.0, 5.0]
    assert seen[0].tolist() == [3.0, 5.0]
    end_double()
    assert tap(X).tolist() == [2.0, 3.0]
    end_add()
    assert tap(X) is X
    assert not tap.has_interventions


def test_an_optional_observer_does_not_force_a_computation():
    tap, seen = Tap(), []
    end = tap.observe_if_computed(seen.append)
    assert not tap.has_observers
    tap(X)
    end()
    tap(X)
    assert len(seen) == 1


def test_a_tap_has_no_parameters():
    assert not Tap().state_dict()
