"""Texts packed into one row, numbered, give what each gives alone."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.tasks.verification.implementations import forward_packed
from tests.agreement.families import berts, close, gpts, seeds, shaken, some_ids

LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def numbered(lengths):
    return torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]


@given(gpts(), seeds, LENGTHS)
def test_gpts_packed_documents_equal_separate_ones(config, seed, lengths):
    model, texts = shaken(config, seed), some_ids(seed, 1, sum(lengths)).split(lengths, dim=1)
    for row, text in zip(forward_packed(model, texts), texts, strict=True):
        close(row, model(text)[0])


@given(berts(), seeds, LENGTHS)
def test_berts_packed_documents_equal_separate_ones(config, seed, lengths):
    model, texts = shaken(config, seed), some_ids(seed, 1, sum(lengths)).split(lengths, dim=1)
    for row, text in zip(forward_packed(model, texts), texts, strict=True):
        close(row, model(text)[0])


@given(gpts(), seeds, LENGTHS, st.data())
def test_padding_among_packed_documents_takes_no_position(config, seed, lengths, data):
    model, ids = shaken(config, seed), some_ids(seed, 1, sum(lengths))
    documents = numbered(lengths)
    marks = data.draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)))
    attention_mask = torch.tensor([marks])
    together = model(ids, documents=documents, attention_mask=attention_mask)
    for number in range(len(lengths)):
        own = (documents == number) & attention_mask
        if own.any():
            close(together[own], model(ids[own][None])[0])
