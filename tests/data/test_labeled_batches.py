"""Labeled batches contain each row once per epoch, have little padding, and are functions of (seed, t)."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.data.labeled_texts import ConcatenatedEncodings, LengthGroupedLabeledBatches
from qkv.text import Encoding


def random_rows(n, *, pairs=False, seed=0):
    generator = np.random.default_rng(seed)
    lengths = generator.integers(3, 41, n)
    return [
        Encoding(
            ids=generator.integers(1, 97, length).tolist(),
            segments=[int(pairs and position > length // 2) for position in range(length)],
        )
        for length in lengths
    ]


def labeled_batches(n=997, *, batch_size=13, seed=0, pairs=False, **options):
    return LengthGroupedLabeledBatches(
        ConcatenatedEncodings(random_rows(n, pairs=pairs)),
        torch.arange(n),
        batch_size=batch_size,
        seed=seed,
        pad_id=0,
        **options,
    )


def padded_batch():
    batches = map(labeled_batches(pairs=True).batch, range(99))
    return next(batch for batch in batches if batch.attention_mask is not None)


@given(n=st.integers(1, 97), batch_size=st.integers(1, 31), seed=st.integers(0, 5), epoch=st.integers(0, 3))
def test_an_epoch_contains_each_row_once(n, batch_size, seed, epoch):
    batches = labeled_batches(n, batch_size=batch_size, seed=seed)
    train_rows = torch.cat([batches.batch(epoch * batches.n_batches + t).rows for t in range(batches.n_batches)])
    assert sorted(train_rows.tolist()) == list(range(n))
    eval_rows = torch.cat([batch.rows for batch in batches.eval_batches_sorted_by_length(batch_size)])
    assert sorted(eval_rows.tolist()) == list(range(n))


def test_batch_t_is_a_function_of_seed_and_t():
    first, second = labeled_batches(seed=3), labeled_batches(seed=3)
    for t in (200, 0, 76, 77, 200):
        assert torch.equal(first.batch(t).ids, second.batch(t).ids)
    assert not torch.equal(first.batch(0).rows, labeled_batches(seed=4).batch(0).rows)
    assert not torch.equal(first.batch(0).rows, first.batch(first.n_batches).rows)


def test_a_row_of_a_batch_is_a_text_followed_by_padding():
    texts = random_rows(997, pairs=True)
    batch = padded_batch()
    for i, row in enumerate(batch.rows.tolist()):
        n = len(texts[row].ids)
        assert batch.ids[i].tolist() == texts[row].ids + [0] * (batch.ids.shape[1] - n)
        assert batch.segments[i].tolist() == texts[row].segments + [0] * (batch.ids.shape[1] - n)
        assert batch.attention_mask[i].sum() == n
        assert batch.targets[i] == row
    assert batch.n_tokens == batch.attention_mask.sum()


def test_there_is_little_padding_and_batches_are_not_ordered_by_length():
    source = labeled_batches()
    batches = [source.batch(t) for t in range(source.n_batches)]
    padding = 1 - sum(batch.n_tokens for batch in batches) / sum(batch.ids.numel() for batch in batches)
    assert padding < 0.05
    widths = [batch.ids.shape[1] for batch in batches]
    assert abs(np.corrcoef(widths, range(len(widths)))[0, 1]) < 0.3


def test_widths_are_rounded_up_to_a_multiple_but_do_not_exceed_the_limit():
    widths = {
        batch.ids.shape[1]
        for batch in labeled_batches(width_multiple=8, max_width=40).eval_batches_sorted_by_length(13)
    }
    assert widths <= {8, 16, 24, 32, 40}
    limited = labeled_batches(width_multiple=32, max_width=41)
    assert max(batch.ids.shape[1] for batch in limited.eval_batches_sorted_by_length(13)) == 41


def test_concatenated_micro_batches_are_the_batch():
    batch = padded_batch()
    parts = list(batch.split(5))
    assert [len(part.ids) for part in parts] == [5, 5, 3]
    for name in ("ids", "segments", "attention_mask", "targets", "rows"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(batch, name))
    assert sum(part.n_targets for part in parts) == batch.n_targets


@pytest.mark.parametrize("length", [1, 7])
def test_rows_of_equal_length_have_no_mask(length):
    row = Encoding(ids=[5] * length, segments=[0] * length)
    batch = LengthGroupedLabeledBatches(
        ConcatenatedEncodings([row] * 3), torch.zeros(3), batch_size=3, seed=0, pad_id=0
    ).batch(0)
    assert batch.attention_mask is None
    assert batch.segments is None
