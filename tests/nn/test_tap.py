"""Tests of taps: identity, observers and interventions."""

import torch

from qkv.nn import Tap

X = torch.tensor([1.0, 2.0])


def test_a_tap_returns_the_same_object():
    tap, anything = Tap(), object()
    assert tap(X) is X
    assert tap(anything) is anything
    assert not tap.observers
    assert not tap.interventions


def test_an_observer_is_called_until_it_is_removed():
    tap, recorded = Tap(), []
    end = tap.observe(recorded.append)
    assert tap.observers
    assert tap(X) is X
    end()
    tap(X * 2)
    assert len(recorded) == 1
    assert recorded[0] is X
    assert not tap.observers


def test_interventions_run_in_order_before_the_observers():
    tap, recorded = Tap(), []
    tap.observe(recorded.append)
    end_double = tap.intervene(lambda x: x * 2)
    end_add = tap.intervene(lambda x: x + 1)
    assert tap.interventions
    assert tap(X).tolist() == [3.0, 5.0]
    assert recorded[0].tolist() == [3.0, 5.0]
    end_double()
    assert tap(X).tolist() == [2.0, 3.0]
    end_add()
    assert tap(X) is X
    assert not tap.interventions


def test_an_optional_observer_does_not_force_a_computation():
    tap, recorded = Tap(), []
    end = tap.observe_if_computed(recorded.append)
    assert not tap.observers
    tap(X)
    end()
    tap(X)
    assert len(recorded) == 1


def test_a_tap_has_no_parameters():
    assert not Tap().state_dict()
