"""Documents packed into one row give the same results as separate ones."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.tasks.verification.implementations import forward_packed
from tests.agreement.model_strategies import assert_close, berts, build_random_model, gpts, random_ids, seeds

LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def document_numbers(lengths):
    return torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]


@given(gpts(), seeds, LENGTHS)
def test_packed_documents_of_gpt_equal_separate_ones(config, seed, lengths):
    model, texts = build_random_model(config, seed), random_ids(seed, 1, sum(lengths)).split(lengths, dim=1)
    for row, text in zip(forward_packed(model, texts), texts, strict=True):
        assert_close(row, model(text)[0])


@given(berts(), seeds, LENGTHS)
def test_packed_documents_of_bert_equal_separate_ones(config, seed, lengths):
    model, texts = build_random_model(config, seed), random_ids(seed, 1, sum(lengths)).split(lengths, dim=1)
    for row, text in zip(forward_packed(model, texts), texts, strict=True):
        assert_close(row, model(text)[0])


@given(gpts(), seeds, LENGTHS, st.data())
def test_padding_between_packed_documents_does_not_count_as_a_position(config, seed, lengths, data):
    model, ids = build_random_model(config, seed), random_ids(seed, 1, sum(lengths))
    documents = document_numbers(lengths)
    marks = data.draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)))
    attention_mask = torch.tensor([marks])
    logits = model(ids, documents=documents, attention_mask=attention_mask)
    for number in range(len(lengths)):
        is_token = (documents == number) & attention_mask
        if is_token.any():
            assert_close(logits[is_token], model(ids[is_token][None])[0])
