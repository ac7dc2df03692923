"""Is a tap an identity until somebody watches or changes it, and again afterwards?"""

import torch

from qkv.nn import Tap

X = torch.tensor([1.0, 2.0])


def test_a_tap_passes_the_very_thing_it_is_given():
    tap, anything = Tap(), object()
    assert tap(X) is X
    assert tap(anything) is anything
    assert not tap.has_observers
    assert not tap.has_interventions


def test_a_watcher_sees_what_passes_until_it_ends():
    tap, seen = Tap(), []
    end = tap.observe(seen.append)
    assert tap.has_observers
    assert tap(X) is X
    end()
    tap(X * 2)
    assert len(seen) == 1
    assert seen[0] is X
    assert not tap.has_observers


def test_changes_are_made_in_turn_and_watchers_see_the_last():
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


def test_a_guest_sees_what_passes_but_asks_for_nothing():
    tap, seen = Tap(), []
    end = tap.observe_if_computed(seen.append)
    assert not tap.has_observers
    tap(X)
    end()
    tap(X)
    assert len(seen) == 1


def test_a_tap_holds_no_weights():
    assert not Tap().state_dict()
