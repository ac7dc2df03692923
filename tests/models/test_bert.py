"""Tests of BERT: shapes, segments and heads."""

import pytest
import torch

from qkv.config import BERTConfig
from qkv.errors import ConfigError, ContextLengthError, InputError
from qkv.models import BERT
from tests.agreement.model_strategies import assert_close, build_random_model, random_ids

SMALL = {"vocab_size": 23, "context_length": 11, "d_model": 10, "n_heads": 5, "n_layers": 2}


@pytest.fixture
def model():
    return build_random_model(BERTConfig(**SMALL, masked_lm_head=True, next_sentence_head=True, n_classes=3))


def test_each_head_reads_the_states(model):
    states = model(random_ids(1, 4, 7))
    assert states.shape == (4, 7, 10)
    assert model.pooled_output(states).shape == (4, 10)
    assert model.masked_lm_logits(states).shape == (4, 7, 23)
    assert model.next_sentence_logits(states).shape == (4, 2)
    assert model.class_logits(states).shape == (4, 3)


def test_the_pooler_reads_only_cls(model):
    states = torch.randn(4, 7, 10, dtype=torch.float64)
    pooled = torch.tanh(states[:, 0] @ model.pooler.weight.T + model.pooler.bias)
    assert_close(model.pooled_output(states), pooled)
    assert_close(model.class_logits(states), pooled @ model.classifier.weight.T + model.classifier.bias)
    assert_close(model.next_sentence_logits(states), pooled @ model.next_sentence.weight.T + model.next_sentence.bias)


def test_the_masked_lm_head_is_tied_to_the_token_embedding(model):
    assert model.masked_lm.unembedding.weight is model.embedding.token.weight
    assert model.masked_lm.unembedding.bias.shape == (23,)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("masked_lm_logits", "masked_lm_head=True"),
        ("next_sentence_logits", "next_sentence_head=True"),
        ("class_logits", "n_classes"),
        ("pooled_output", "pooler=True"),
    ],
)
def test_a_missing_head_names_the_setting_that_adds_it(method, message):
    model = BERT(BERTConfig(**SMALL, pooler=False))
    with pytest.raises(ConfigError, match=message):
        getattr(model, method)(torch.zeros(4, 7, 10))


def test_segments_matter_and_default_to_zero(model):
    ids = random_ids(1, 4, 7)
    second = torch.zeros_like(ids)
    assert_close(model(ids), model(ids, segments=second))
    second[:, 4:] = 1
    assert (model(ids) - model(ids, segments=second)).abs().amax((0, 2)).min() > 1e-6


def test_an_unknown_segment_is_rejected(model):
    ids = random_ids(1, 4, 7)
    with pytest.raises(InputError, match=r"segment 2\b"):
        model(ids, segments=torch.full_like(ids, 2))


def test_every_position_attends_to_every_other(model):
    ids = random_ids(1, 4, 7, 19)
    changed = ids.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 19
    assert (model(ids) - model(changed)).abs().amax((0, 2)).min() > 1e-6


def test_more_tokens_than_positions_are_rejected(model):
    with pytest.raises(ContextLengthError, match=r"\b12 tokens\b.*context_length\b.*\b11\b"):
        model(random_ids(1, 4, 12))
