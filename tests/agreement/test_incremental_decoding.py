"""Several passes with a cache give the same results as a single pass."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.choices import PositionKind
from qkv.config import GPTConfig
from qkv.tasks.verification.implementations import forward_in_chunks
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

LENGTH = 11
cuts = st.sets(st.integers(1, LENGTH - 1)).map(sorted)


@given(gpts(), seeds, cuts)
def test_gpt_with_a_cache_equals_a_single_pass(config, seed, cuts):
    model, ids = build_random_model(config, seed), random_ids(seed, 3, LENGTH)
    assert_close(forward_in_chunks(model, ids, cuts), model(ids))


@given(seq2seqs(), seeds, cuts)
def test_seq2seq_with_a_cache_equals_a_single_pass(config, seed, cuts):
    model, ids, source = build_random_model(config, seed), random_ids(seed, 3, LENGTH), random_source_ids(seed, 3, 5)
    assert_close(forward_in_chunks(model, ids, cuts, source=source), model(source, ids))


@given(rnns(), seeds, cuts)
def test_rnn_step_by_step_equals_a_single_pass(config, seed, cuts):
    model, ids, source = build_random_model(config, seed), random_ids(seed, 3, LENGTH), random_source_ids(seed, 3, 5)
    assert_close(forward_in_chunks(model, ids, cuts, source=source), model(source, ids))


@st.composite
def ragged_passes(draw):
    """Draw the attention mask of 3 rows for each pass. In the first pass, every row has at least one token."""
    passes = []
    for i in range(draw(st.integers(1, 4))):
        n = draw(st.integers(1, 5))
        rows = [draw(st.lists(st.booleans(), min_size=n, max_size=n)) for _ in range(3)]
        if i == 0:
            for row in rows:
                row[draw(st.integers(0, n - 1))] = True
        passes.append(torch.tensor(rows))
    return passes


@given(gpts(), seeds, ragged_passes())
def test_rows_of_different_lengths_share_a_cache(config, seed, passes):
    """With padding anywhere in any pass, each row gets the same logits as without the other rows."""
    model = build_random_model(config, seed)
    ids = [random_ids(seed + i, 3, attention_mask.shape[1]) for i, attention_mask in enumerate(passes)]
    cache = model.new_cache(batch=3)
    logits = [
        model(new_ids, attention_mask=attention_mask, cache=cache)
        for new_ids, attention_mask in zip(ids, passes, strict=True)
    ]
    for row in range(3):
        row_ids = [new_ids[row, attention_mask[row]] for new_ids, attention_mask in zip(ids, passes, strict=True)]
        row_logits = [
            new_logits[row, attention_mask[row]] for new_logits, attention_mask in zip(logits, passes, strict=True)
        ]
        assert_close(torch.cat(row_logits), model(torch.cat(row_ids)[None])[0])
    assert cache.lengths.tolist() == [
        sum(int(attention_mask[row].sum()) for attention_mask in passes) for row in range(3)
    ]


@given(gpts(), seeds, st.lists(st.integers(0, 2), min_size=1, max_size=5))
def test_reordered_rows_continue_as_if_computed_from_the_start(config, seed, rows):
    model = build_random_model(config, seed)
    ids, more = random_ids(seed, 3, 5), random_ids(seed + 1, len(rows), 2)
    cache = model.new_cache(batch=3)
    model(ids, cache=cache)
    cache.reorder(torch.tensor(rows))
    assert_close(model(more, cache=cache), model(torch.cat((ids[rows], more), dim=1))[:, 5:])


def test_reordering_a_ragged_cache_reorders_its_lengths():
    model = build_random_model(GPTConfig(vocab_size=23, context_length=29, d_model=12, n_heads=3, n_layers=2,
                             positions=PositionKind.ROTARY))  # fmt: skip
    ids, more = random_ids(1, 2, 5), random_ids(2, 2, 3)
    attention_mask = torch.tensor([[True] * 5, [True, True, False, False, False]])
    cache = model.new_cache(batch=2)
    model(ids, attention_mask=attention_mask, cache=cache)
    cache.reorder(torch.tensor([1, 0]))
    logits = model(more, cache=cache)
    assert_close(logits[0], model(torch.cat((ids[1, :2], more[0]))[None])[0, 2:])
    assert_close(logits[1], model(torch.cat((ids[0], more[1]))[None])[0, 5:])
