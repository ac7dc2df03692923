"""Beams that share a source give the same results as with a repeated source."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.nn import Mask, Source
from tests.agreement.model_strategies import (
    assert_close,
    build_random_model,
    random_ids,
    random_source_ids,
    rnns,
    seeds,
    seq2seqs,
)

n_beams = st.integers(1, 4)


def repeat_source(source: Source, n: int) -> Source:
    mask = source.mask and Mask(key_padding_mask=source.mask.key_padding_mask.repeat_interleave(n, dim=0))
    return Source(states=source.states.repeat_interleave(n, dim=0), mask=mask)


def encode_random_source(model, seed):
    attention_mask = torch.tensor([[True] * 5, [False, True, True, False, False]])
    return model.encode(random_source_ids(seed, 2, 5), attention_mask=attention_mask)


@given(seq2seqs(), seeds, n_beams)
def test_seq2seqs_beams_share_a_source(config, seed, n):
    model, ids = build_random_model(config, seed), random_ids(seed, 2 * n, 7)
    source = encode_random_source(model, seed)
    assert_close(model.decode(ids, source), model.decode(ids, repeat_source(source, n)))


@given(seq2seqs(), seeds, n_beams, st.data())
def test_reordered_beams_with_a_cache_equal_a_fresh_pass(config, seed, n, data):
    model, ids, more = build_random_model(config, seed), random_ids(seed, 2 * n, 5), random_ids(seed + 1, 2 * n, 2)
    source = encode_random_source(model, seed)
    within = [data.draw(st.integers(0, n - 1)) for _ in range(2 * n)]
    rows = torch.tensor([row // n * n + beam for row, beam in enumerate(within)])
    cache = model.new_cache(batch=2 * n)
    model.decode(ids, source, cache=cache)
    cache.reorder(rows)
    fresh = model.decode(torch.cat((ids[rows], more), dim=1), repeat_source(source, n))
    assert_close(model.decode(more, source, cache=cache), fresh[:, 5:])


@given(rnns(), seeds, n_beams)
def test_an_rnns_beams_share_a_source(config, seed, n):
    model, ids = build_random_model(config, seed), random_ids(seed, 2 * n, 7)
    start = encode_random_source(model, seed)
    state = tuple(part.repeat_interleave(n, dim=1) for part in start.state)
    shared, _ = model.decode(ids, start.source, state)
    separate, _ = model.decode(ids, repeat_source(start.source, n), state)
    assert_close(shared, separate)
