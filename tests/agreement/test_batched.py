"""Sequences side by side, padded with anything, give what each gives alone."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.agreement.families import berts, close, gpts, rnns, seeds, seq2seqs, shaken, some_ids, some_source

LENGTH, SOURCE_LENGTH = 7, 5


@st.composite
def paddings(draw, *, n):
    """Which of n columns of 3 rows hold a token: padded left, right, on both sides or in between; never all."""
    rows = []
    for _ in range(3):
        row = draw(st.lists(st.booleans(), min_size=n, max_size=n))
        row[draw(st.integers(0, n - 1))] = True
        rows.append(row)
    return torch.tensor(rows)


def one_by_one(ids, attention_mask):
    """Each row's tokens alone, without its padding; the padding held random ids."""
    return [row[marks][None] for row, marks in zip(ids, attention_mask, strict=True)]


@given(gpts(), seeds)
def test_gpt_batched_equals_one_by_one(config, seed):
    model, ids = shaken(config, seed), some_ids(seed, 3, LENGTH)
    close(model(ids), torch.cat([model(row[None]) for row in ids]))


@given(seq2seqs(), seeds)
def test_seq2seq_batched_equals_one_by_one(config, seed):
    model, ids, source = shaken(config, seed), some_ids(seed, 3, LENGTH), some_source(seed, 3, SOURCE_LENGTH)
    alone = [model(one[None], row[None]) for one, row in zip(source, ids, strict=True)]
    close(model(source, ids), torch.cat(alone))


@given(gpts(), seeds, paddings(n=LENGTH))
def test_gpt_padded_with_garbage_equals_unpadded(config, seed, attention_mask):
    model, ids = shaken(config, seed), some_ids(seed, 3, LENGTH)
    padded = model(ids, attention_mask=attention_mask)
    for logits, marks, alone in zip(padded, attention_mask, one_by_one(ids, attention_mask), strict=True):
        close(logits[marks], model(alone)[0])


@given(gpts(causal=False), seeds, paddings(n=LENGTH))
def test_gpt_without_its_mask_padded_with_garbage_equals_unpadded(config, seed, attention_mask):
    model, ids = shaken(config, seed), some_ids(seed, 3, LENGTH)
    padded = model(ids, attention_mask=attention_mask)
    for logits, marks, alone in zip(padded, attention_mask, one_by_one(ids, attention_mask), strict=True):
        close(logits[marks], model(alone)[0])


@given(berts(), seeds, paddings(n=LENGTH))
def test_bert_padded_with_garbage_equals_unpadded(config, seed, attention_mask):
    model, ids, segments = shaken(config, seed), some_ids(seed, 3, LENGTH), some_ids(seed, 3, LENGTH, 2)
    padded = model(ids, segments=segments, attention_mask=attention_mask)
    rows = zip(padded, attention_mask, one_by_one(ids, attention_mask), one_by_one(segments, attention_mask), strict=True)
    for states, marks, alone, own_segments in rows:
        close(states[marks], model(alone, segments=own_segments)[0])


@given(berts(), seeds, st.integers(1, LENGTH))
def test_berts_heads_do_not_see_padding_on_the_right(config, seed, n):
    model, ids = shaken(config, seed), some_ids(seed, 3, LENGTH)
    attention_mask = (torch.arange(LENGTH) < n).expand(3, -1)
    padded, alone = model(ids, attention_mask=attention_mask), model(ids[:, :n])
    close(model.class_logits(padded), model.class_logits(alone))
    close(model.next_sentence_logits(padded), model.next_sentence_logits(alone))
    close(model.masked_lm_logits(padded)[:, :n], model.masked_lm_logits(alone))


@given(seq2seqs(), seeds, paddings(n=SOURCE_LENGTH), paddings(n=LENGTH))
def test_seq2seq_padded_with_garbage_equals_unpadded(config, seed, source_attention_mask, attention_mask):
    model, ids, source = shaken(config, seed), some_ids(seed, 3, LENGTH), some_source(seed, 3, SOURCE_LENGTH)
    padded = model(source, ids, source_attention_mask=source_attention_mask, attention_mask=attention_mask)
    alone = zip(one_by_one(source, source_attention_mask), one_by_one(ids, attention_mask), strict=True)
    for logits, marks, (own_source, own_ids) in zip(padded, attention_mask, alone, strict=True):
        close(logits[marks], model(own_source, own_ids)[0])


@given(rnns(), seeds, paddings(n=SOURCE_LENGTH))
def test_an_rnns_source_padded_with_garbage_equals_unpadded(config, seed, source_attention_mask):
    model, ids, source = shaken(config, seed), some_ids(seed, 3, LENGTH), some_source(seed, 3, SOURCE_LENGTH)
    padded = model(source, ids, source_attention_mask=source_attention_mask)
    alone = [
        model(own[None], row[None])
        for own, row in zip((row[marks] for row, marks in zip(source, source_attention_mask, strict=True)), ids, strict=True)
    ]  # fmt: skip
    close(padded, torch.cat(alone))
