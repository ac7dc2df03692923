"""Batches of like length: every row once an epoch, little padding, the same batch for the same number."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.data.labeled_batches import LabeledBatches, RaggedSequences
from qkv.text import Encoding


def rows(n, *, pairs=False, seed=0):
    chance = np.random.default_rng(seed)
    lengths = chance.integers(3, 41, n)
    return [
        Encoding(
            ids=chance.integers(1, 97, length).tolist(),
            segments=[int(pairs and place > length // 2) for place in range(length)],
        )
        for length in lengths
    ]


def buckets(n=997, *, batch_size=13, seed=0, pairs=False, **more):
    return LabeledBatches(
        RaggedSequences(rows(n, pairs=pairs)), torch.arange(n), batch_size=batch_size, seed=seed, pad_id=0, **more
    )


def padded_batch():
    return next(batch for batch in map(buckets(pairs=True).batch, range(99)) if batch.attention_mask is not None)


@given(n=st.integers(1, 97), batch_size=st.integers(1, 31), seed=st.integers(0, 5), epoch=st.integers(0, 3))
def test_an_epoch_has_every_row_once(n, batch_size, seed, epoch):
    made = buckets(n, batch_size=batch_size, seed=seed)
    seen = torch.cat([made.batch(epoch * made.n_batches + t).rows for t in range(made.n_batches)])
    assert sorted(seen.tolist()) == list(range(n))
    swept = torch.cat([batch.rows for batch in made.eval_batches(batch_size)])
    assert sorted(swept.tolist()) == list(range(n))


def test_batch_t_is_a_function_of_seed_and_t():
    one, other = buckets(seed=3), buckets(seed=3)
    for t in (200, 0, 76, 77, 200):
        assert torch.equal(one.batch(t).ids, other.batch(t).ids)
    assert not torch.equal(one.batch(0).rows, buckets(seed=4).batch(0).rows)
    assert not torch.equal(one.batch(0).rows, one.batch(one.n_batches).rows)


def test_a_row_of_a_batch_is_the_text_and_then_padding():
    texts = rows(997, pairs=True)
    batch = padded_batch()
    for i, row in enumerate(batch.rows.tolist()):
        n = len(texts[row].ids)
        assert batch.ids[i].tolist() == texts[row].ids + [0] * (batch.ids.shape[1] - n)
        assert batch.segments[i].tolist() == texts[row].segments + [0] * (batch.ids.shape[1] - n)
        assert batch.attention_mask[i].sum() == n
        assert batch.targets[i] == row
    assert batch.n_tokens == batch.attention_mask.sum()


def test_little_is_padding_and_length_says_nothing_about_time():
    made = buckets()
    batches = [made.batch(t) for t in range(made.n_batches)]
    padded = 1 - sum(batch.n_tokens for batch in batches) / sum(batch.ids.numel() for batch in batches)
    assert padded < 0.05
    widths = [batch.ids.shape[1] for batch in batches]
    assert abs(np.corrcoef(widths, range(len(widths)))[0, 1]) < 0.3


def test_widths_are_rounded_up_but_not_past_the_limit():
    widths = {batch.ids.shape[1] for batch in buckets(width_multiple=8, max_width=40).eval_batches(13)}
    assert widths <= {8, 16, 24, 32, 40}
    assert max(batch.ids.shape[1] for batch in buckets(width_multiple=32, max_width=41).eval_batches(13)) == 41


def test_parts_of_a_batch_are_the_batch():
    batch = padded_batch()
    parts = list(batch.split(5))
    assert [len(part.ids) for part in parts] == [5, 5, 3]
    for name in ("ids", "segments", "attention_mask", "targets", "rows"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(batch, name))
    assert sum(part.n_targets for part in parts) == batch.n_targets


@pytest.mark.parametrize("length", [1, 7])
def test_rows_equally_long_need_no_mask(length):
    row = Encoding(ids=[5] * length, segments=[0] * length)
    batch = LabeledBatches(RaggedSequences([row] * 3), torch.zeros(3), batch_size=3, seed=0, pad_id=0).batch(0)
    assert batch.attention_mask is None
    assert batch.segments is None
