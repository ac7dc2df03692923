"""Nothing before a position depends on what stands after it; and what should be seen is seen."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.agreement.families import close, gpts, rnns, seeds, seq2seqs, shaken, some_ids, some_source

LENGTH = 7
cut = st.integers(1, LENGTH - 1)


def with_another_future(ids, n):
    """The same first n ids; every later one is another."""
    changed = ids.clone()
    changed[:, n:] = (changed[:, n:] + 1) % 19
    return changed


@given(gpts(), seeds, cut)
def test_gpts_past_does_not_depend_on_the_future(config, seed, n):
    model, ids = shaken(config, seed), some_ids(seed, 3, LENGTH, 19)
    one, other = model(ids), model(with_another_future(ids, n))
    close(one[:, :n], other[:, :n])
    assert not torch.allclose(one[:, n:], other[:, n:])


@given(seq2seqs(), seeds, cut)
def test_seq2seqs_past_does_not_depend_on_the_future_of_the_target(config, seed, n):
    model, ids, source = shaken(config, seed), some_ids(seed, 3, LENGTH, 19), some_source(seed, 3, 5)
    close(model(source, ids)[:, :n], model(source, with_another_future(ids, n))[:, :n])


@given(seq2seqs(sliding_window=None), seeds)
def test_the_first_target_position_sees_the_whole_source(config, seed):
    """Lecture C's slip, the causal mask in cross-attention, would hide all but the first source token."""
    model, ids, source = shaken(config, seed), some_ids(seed, 3, LENGTH), some_source(seed, 3, 5)
    states = model.encode(source)
    last_changed = states.states.clone()
    last_changed[:, -1] += 1.0
    one = model.decode(ids, states)
    other = model.decode(ids, type(states)(states=last_changed))
    assert (one - other).abs().amax((0, 2)).min() > 1e-6


@given(rnns(), seeds, cut)
def test_an_rnns_past_does_not_depend_on_the_future_of_the_target(config, seed, n):
    model, ids, source = shaken(config, seed), some_ids(seed, 3, LENGTH, 19), some_source(seed, 3, 5)
    close(model(source, ids)[:, :n], model(source, with_another_future(ids, n))[:, :n])


@given(gpts(sliding_window=3, n_layers=1), seeds)
def test_a_window_of_three_sees_itself_and_two_back(config, seed):
    model, ids = shaken(config, seed), some_ids(seed, 3, LENGTH, 19)
    changed = ids.clone()
    changed[:, 2] = (changed[:, 2] + 1) % 19
    differs = (model(ids) - model(changed)).abs().amax((0, 2)) > 1e-7
    assert differs.tolist() == [False, False, True, True, True, False, False]
