"""Observing activations changes no bit and keeps the fused kernel."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import qkv
from tests.agreement.model_strategies import (
    berts,
    build_random_model,
    gpts,
    random_ids,
    random_source_ids,
    rnns,
    seeds,
    seq2seqs,
)
from tests.agreement.operator_counter import Operators

FAMILIES = {
    "gpt": (gpts(fusable=True), lambda model, seed: model(random_ids(seed, 3, 7))),
    "bert": (berts(fusable=True), lambda model, seed: model(random_ids(seed, 3, 7))),
    "seq2seq": (
        seq2seqs(fusable=True),
        lambda model, seed: model(random_source_ids(seed, 3, 5), random_ids(seed, 3, 7)),
    ),
    "rnn": (rnns(), lambda model, seed: model(random_source_ids(seed, 3, 5), random_ids(seed, 3, 7))),
}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=10)
@given(data=st.data(), seed=seeds)
def test_observing_changes_no_bit_and_keeps_the_fused_kernel(family, data, seed):
    configs, run = FAMILIES[family]
    model = build_random_model(data.draw(configs), seed)
    with torch.no_grad():
        with Operators() as unwatched_operators:
            unwatched = run(model, seed)
        with qkv.record(model) as trace, Operators() as watched_operators:
            watched = run(model, seed)
    assert torch.equal(watched, unwatched)
    assert watched_operators.n_fused == unwatched_operators.n_fused
    assert watched_operators.n_softmax == unwatched_operators.n_softmax
    assert (watched_operators.n_fused > 0) == (family != "rnn")
    for name in trace.names:
        assert trace.n_passes(name) == 1
        if name.endswith("weights"):
            sums = trace[name].sum(-1)
            torch.testing.assert_close(sums, torch.ones_like(sums))


@given(gpts(), seeds)
def test_the_recorded_weights_are_the_weights_used(config, seed):
    model = build_random_model(config, seed)
    with qkv.record(model, "*.weights") as trace:
        model(random_ids(seed, 3, 7))
    assert max(trace.attention(f"blocks.{i}.attention").reconstruction_error for i in range(2)) < 1e-9
