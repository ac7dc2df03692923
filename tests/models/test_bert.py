"""BERT: shapes, segments, heads that are there and heads that are not."""

import pytest
import torch

from qkv.config import BERTConfig
from qkv.errors import ConfigError, ContextLengthError, InputError
from qkv.models import BERT
from tests.agreement.families import close, shaken, some_ids

SMALL = {"vocab_size": 23, "context_length": 11, "d_model": 10, "n_heads": 5, "n_layers": 2}


@pytest.fixture
def model():
    return shaken(BERTConfig(**SMALL, masked_lm_head=True, next_sentence_head=True, n_classes=3))


def test_each_head_reads_the_states(model):
    states = model(some_ids(1, 4, 7))
    assert states.shape == (4, 7, 10)
    assert model.pooled_output(states).shape == (4, 10)
    assert model.masked_lm_logits(states).shape == (4, 7, 23)
    assert model.next_sentence_logits(states).shape == (4, 2)
    assert model.class_logits(states).shape == (4, 3)


def test_the_pooler_reads_cls_alone(model):
    states = torch.randn(4, 7, 10, dtype=torch.float64)
    pooled = torch.tanh(states[:, 0] @ model.pooler.weight.T + model.pooler.bias)
    close(model.pooled_output(states), pooled)
    close(model.class_logits(states), pooled @ model.classifier.weight.T + model.classifier.bias)
    close(model.next_sentence_logits(states), pooled @ model.next_sentence.weight.T + model.next_sentence.bias)


def test_the_masked_word_head_ends_in_the_token_table(model):
    assert model.masked_lm.unembedding.weight is model.embedding.token.weight
    assert model.masked_lm.unembedding.bias.shape == (23,)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("masked_lm_logits", "this BERT has no masked-word head; build it with masked_lm_head=True"),
        ("next_sentence_logits", "this BERT has no next-sentence head; build it with next_sentence_head=True"),
        ("class_logits", "this BERT has no classification head; build it with n_classes"),
        ("pooled", "this BERT has no pooler; build it with pooler=True"),
    ],
)
def test_a_head_that_is_not_there_says_how_to_get_it(method, message):
    model = BERT(BERTConfig(**SMALL, pooler=False))
    with pytest.raises(ConfigError, match=message):
        getattr(model, method)(torch.zeros(4, 7, 10))


def test_segments_count_and_are_zero_unless_given(model):
    ids = some_ids(1, 4, 7)
    second = torch.zeros_like(ids)
    close(model(ids), model(ids, segments=second))
    second[:, 4:] = 1
    assert (model(ids) - model(ids, segments=second)).abs().amax((0, 2)).min() > 1e-6


def test_a_segment_that_is_not_there_is_refused(model):
    ids = some_ids(1, 4, 7)
    with pytest.raises(InputError, match="2 is outside"):
        model(ids, segments=torch.full_like(ids, 2))


def test_every_position_sees_every_other(model):
    ids = some_ids(1, 4, 7, 19)
    changed = ids.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 19
    assert (model(ids) - model(changed)).abs().amax((0, 2)).min() > 1e-6


def test_more_tokens_than_positions_are_refused(model):
    with pytest.raises(ContextLengthError, match="12 tokens, but the model's context_length is 11"):
        model(some_ids(1, 4, 12))
