"""Watching changes nothing: the same bits, by the same fused kernel."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import qkv
from tests.agreement.families import berts, gpts, rnns, seeds, seq2seqs, shaken, some_ids, some_source
from tests.agreement.operators import Operators

FAMILIES = {
    "gpt": (gpts(fusable=True), lambda model, seed: model(some_ids(seed, 3, 7))),
    "bert": (berts(fusable=True), lambda model, seed: model(some_ids(seed, 3, 7))),
    "seq2seq": (seq2seqs(fusable=True), lambda model, seed: model(some_source(seed, 3, 5), some_ids(seed, 3, 7))),
    "rnn": (rnns(), lambda model, seed: model(some_source(seed, 3, 5), some_ids(seed, 3, 7))),
}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=10)
@given(data=st.data(), seed=seeds)
def test_watched_equals_unwatched_bit_for_bit_and_stays_fused(family, data, seed):
    configs, run = FAMILIES[family]
    model = shaken(data.draw(configs), seed)
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
def test_the_weights_shown_are_the_weights_used(config, seed):
    model = shaken(config, seed)
    with qkv.record(model, "*.weights") as trace:
        model(some_ids(seed, 3, 7))
    assert max(trace.attention(f"blocks.{i}.attention").error for i in range(2)) < 1e-9
