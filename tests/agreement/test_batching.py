"""Batched and padded sequences give the same results as single sequences."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.agreement.model_strategies import (
    assert_close,
    berts,
    build_random_model,
    gpts,
    random_ids,
    random_source_ids,
    rnns,
    seeds,
    seq2seqs,
)

LENGTH, SOURCE_LENGTH = 7, 5


@st.composite
def paddings(draw, *, n):
    """Draw an attention mask of 3 rows and n columns with padding anywhere. No row is entirely padding."""
    rows = []
    for _ in range(3):
        row = draw(st.lists(st.booleans(), min_size=n, max_size=n))
        row[draw(st.integers(0, n - 1))] = True
        rows.append(row)
    return torch.tensor(rows)


def unpadded_rows(ids, attention_mask):
    """Returns the tokens of each row without padding."""
    return [row[marks][None] for row, marks in zip(ids, attention_mask, strict=True)]


@given(gpts(), seeds)
def test_gpt_batched_equals_one_by_one(config, seed):
    model, ids = build_random_model(config, seed), random_ids(seed, 3, LENGTH)
    assert_close(model(ids), torch.cat([model(row[None]) for row in ids]))


@given(seq2seqs(), seeds)
def test_seq2seq_batched_equals_one_by_one(config, seed):
    model, ids, source = (
        build_random_model(config, seed),
        random_ids(seed, 3, LENGTH),
        random_source_ids(seed, 3, SOURCE_LENGTH),
    )
    alone = [model(source_row[None], row[None]) for source_row, row in zip(source, ids, strict=True)]
    assert_close(model(source, ids), torch.cat(alone))


@given(gpts(), seeds, paddings(n=LENGTH))
def test_gpt_padded_with_garbage_equals_unpadded(config, seed, attention_mask):
    model, ids = build_random_model(config, seed), random_ids(seed, 3, LENGTH)
    padded = model(ids, attention_mask=attention_mask)
    for logits, marks, alone in zip(padded, attention_mask, unpadded_rows(ids, attention_mask), strict=True):
        assert_close(logits[marks], model(alone)[0])


@given(gpts(causal=False), seeds, paddings(n=LENGTH))
def test_gpt_without_its_mask_padded_with_garbage_equals_unpadded(config, seed, attention_mask):
    model, ids = build_random_model(config, seed), random_ids(seed, 3, LENGTH)
    padded = model(ids, attention_mask=attention_mask)
    for logits, marks, alone in zip(padded, attention_mask, unpadded_rows(ids, attention_mask), strict=True):
        assert_close(logits[marks], model(alone)[0])


@given(berts(), seeds, paddings(n=LENGTH))
def test_bert_padded_with_garbage_equals_unpadded(config, seed, attention_mask):
    model, ids, segments = build_random_model(config, seed), random_ids(seed, 3, LENGTH), random_ids(seed, 3, LENGTH, 2)
    padded = model(ids, segments=segments, attention_mask=attention_mask)
    rows = zip(
        padded, attention_mask, unpadded_rows(ids, attention_mask), unpadded_rows(segments, attention_mask), strict=True
    )
    for states, marks, alone, own_segments in rows:
        assert_close(states[marks], model(alone, segments=own_segments)[0])


@given(berts(), seeds, st.integers(1, LENGTH))
def test_berts_heads_do_not_see_padding_on_the_right(config, seed, n):
    model, ids = build_random_model(config, seed), random_ids(seed, 3, LENGTH)
    attention_mask = (torch.arange(LENGTH) < n).expand(3, -1)
    padded, alone = model(ids, attention_mask=attention_mask), model(ids[:, :n])
    assert_close(model.class_logits(padded), model.class_logits(alone))
    assert_close(model.next_sentence_logits(padded), model.next_sentence_logits(alone))
    assert_close(model.masked_lm_logits(padded)[:, :n], model.masked_lm_logits(alone))


@given(seq2seqs(), seeds, paddings(n=SOURCE_LENGTH), paddings(n=LENGTH))
def test_seq2seq_padded_with_garbage_equals_unpadded(config, seed, source_attention_mask, attention_mask):
    model, ids, source = (
        build_random_model(config, seed),
        random_ids(seed, 3, LENGTH),
        random_source_ids(seed, 3, SOURCE_LENGTH),
    )
    padded = model(source, ids, source_attention_mask=source_attention_mask, attention_mask=attention_mask)
    alone = zip(unpadded_rows(source, source_attention_mask), unpadded_rows(ids, attention_mask), strict=True)
    for logits, marks, (own_source, own_ids) in zip(padded, attention_mask, alone, strict=True):
        assert_close(logits[marks], model(own_source, own_ids)[0])


@given(rnns(), seeds, paddings(n=SOURCE_LENGTH))
def test_an_rnns_source_padded_with_garbage_equals_unpadded(config, seed, source_attention_mask):
    model, ids, source = (
        build_random_model(config, seed),
        random_ids(seed, 3, LENGTH),
        random_source_ids(seed, 3, SOURCE_LENGTH),
    )
    padded = model(source, ids, source_attention_mask=source_attention_mask)
    unpadded = [row[is_token] for row, is_token in zip(source, source_attention_mask, strict=True)]
    alone = [model(source_row[None], row[None]) for source_row, row in zip(unpadded, ids, strict=True)]
    assert_close(padded, torch.cat(alone))
