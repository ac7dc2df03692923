"""Outputs do not depend on later positions, and do depend on all positions that should be visible."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.agreement.model_strategies import (
    assert_close,
    build_random_model,
    gpts,
    random_ids,
    random_source_ids,
    rnns,
    seeds,
    seq2seqs,
)

LENGTH = 7
cut = st.integers(1, LENGTH - 1)


def with_another_future(ids, n):
    """Returns the ids with all ids after the first n changed."""
    changed = ids.clone()
    changed[:, n:] = (changed[:, n:] + 1) % 19
    return changed


@given(gpts(), seeds, cut)
def test_gpts_past_does_not_depend_on_the_future(config, seed, n):
    model, ids = build_random_model(config, seed), random_ids(seed, 3, LENGTH, 19)
    logits, changed_logits = model(ids), model(with_another_future(ids, n))
    assert_close(logits[:, :n], changed_logits[:, :n])
    assert not torch.allclose(logits[:, n:], changed_logits[:, n:])


@given(seq2seqs(), seeds, cut)
def test_seq2seqs_past_does_not_depend_on_the_future_of_the_target(config, seed, n):
    model, ids, source = (
        build_random_model(config, seed),
        random_ids(seed, 3, LENGTH, 19),
        random_source_ids(seed, 3, 5),
    )
    assert_close(model(source, ids)[:, :n], model(source, with_another_future(ids, n))[:, :n])


@given(seq2seqs(sliding_window=None), seeds)
def test_the_first_target_position_attends_to_the_entire_source(config, seed):
    """A causal mask in cross-attention (an error in lecture C) would hide all but the first source token."""
    model, ids, source = build_random_model(config, seed), random_ids(seed, 3, LENGTH), random_source_ids(seed, 3, 5)
    states = model.encode(source)
    last_changed = states.states.clone()
    last_changed[:, -1] += 1.0
    logits = model.decode(ids, states)
    changed_logits = model.decode(ids, type(states)(states=last_changed))
    assert (logits - changed_logits).abs().amax((0, 2)).min() > 1e-6


@given(rnns(), seeds, cut)
def test_an_rnns_past_does_not_depend_on_the_future_of_the_target(config, seed, n):
    model, ids, source = (
        build_random_model(config, seed),
        random_ids(seed, 3, LENGTH, 19),
        random_source_ids(seed, 3, 5),
    )
    assert_close(model(source, ids)[:, :n], model(source, with_another_future(ids, n))[:, :n])


@given(gpts(sliding_window=3, n_layers=1), seeds)
def test_a_sliding_window_of_three_covers_two_previous_tokens(config, seed):
    model, ids = build_random_model(config, seed), random_ids(seed, 3, LENGTH, 19)
    changed = ids.clone()
    changed[:, 2] = (changed[:, 2] + 1) % 19
    differs = (model(ids) - model(changed)).abs().amax((0, 2)) > 1e-7
    assert differs.tolist() == [False, False, True, True, True, False, False]
