"""Tests of the RNN encoder–decoder: shapes, single steps and rejected inputs."""

import pytest
import torch

from qkv.choices import CellKind, RNNAttentionScore
from qkv.config import RNNConfig
from qkv.errors import ContextLengthError, InputError, ShapeError
from tests.agreement.model_strategies import assert_close, build_random_model, random_ids, random_source_ids

SMALL = {"vocab_size": 23, "source_vocab_size": 19, "d_model": 10, "context_length": 11}


@pytest.fixture
def model():
    return build_random_model(RNNConfig(**SMALL))


@pytest.mark.parametrize("cell", CellKind)
@pytest.mark.parametrize("attention", RNNAttentionScore)
@pytest.mark.parametrize("n_layers", [1, 3])
def test_every_target_position_gets_a_logit_for_every_token(cell, attention, n_layers):
    config = RNNConfig(**SMALL, cell=cell, attention=attention, n_decoder_layers=n_layers, n_encoder_layers=2)
    model = build_random_model(config)
    assert model(random_source_ids(1, 3, 5), random_ids(1, 3, 7)).shape == (3, 7, 23)
    state = model.encode(random_source_ids(1, 3, 5)).state
    assert [part.shape for part in state] == [(n_layers, 3, 10)] * (1 if cell is CellKind.GRU else 2)


@pytest.mark.parametrize("cell", CellKind)
def test_a_single_step_continues_from_a_state(cell):
    model = build_random_model(RNNConfig(**SMALL, cell=cell, n_decoder_layers=2))
    source, ids = random_source_ids(1, 3, 5), random_ids(1, 3, 7)
    start = model.encode(source)
    state, steps = start.state, []
    for t in range(7):
        logits, state = model.decode(ids[:, t : t + 1], start.source, state)
        assert logits.shape == (3, 1, 23)
        steps.append(logits)
    assert_close(torch.cat(steps, dim=1), model(source, ids))


def test_without_attention_the_decoder_depends_only_on_the_initial_state():
    model = build_random_model(RNNConfig(**SMALL, attention=RNNAttentionScore.NONE))
    ids, start = random_ids(1, 3, 7), model.encode(random_source_ids(1, 3, 5))
    other = model.encode(random_source_ids(9, 3, 5))
    assert_close(model.decode(ids, start.source, start.state)[0], model.decode(ids, other.source, start.state)[0])


@pytest.mark.parametrize("attention", [RNNAttentionScore.DOT, RNNAttentionScore.GENERAL, RNNAttentionScore.ADDITIVE])
def test_with_attention_the_decoder_depends_on_every_source_state(attention):
    model = build_random_model(RNNConfig(**SMALL, attention=attention))
    ids, start = random_ids(1, 3, 7), model.encode(random_source_ids(1, 3, 5))
    for position in range(5):
        states = start.source.states.clone()
        states[:, position] += 1.0
        changed = model.decode(ids, type(start.source)(states=states), start.state)[0]
        difference = changed - model.decode(ids, start.source, start.state)[0]
        assert difference.abs().amax((0, 2)).min() > 1e-9


def test_a_source_without_tokens_is_rejected(model):
    attention_mask = torch.tensor([[True] * 5, [False] * 5, [True] * 5])
    with pytest.raises(InputError, match=r"row 1\b.*\b0\b"):
        model(random_source_ids(1, 3, 5), random_ids(1, 3, 7), source_attention_mask=attention_mask)


def test_more_tokens_than_the_context_are_rejected(model):
    with pytest.raises(ContextLengthError, match=r"\b12 tokens\b.*context_length\b.*\b11\b"):
        model(random_source_ids(1, 3, 12), random_ids(1, 3, 7))
    with pytest.raises(ContextLengthError, match=r"\b13 tokens\b.*context_length\b.*\b11\b"):
        model(random_source_ids(1, 3, 5), random_ids(1, 3, 13))


def test_ids_outside_the_vocabulary_are_rejected(model):
    with pytest.raises(InputError, match=r"id 19\b.*0 … 18"):
        model(torch.full((3, 5), 19), random_ids(1, 3, 7))
    with pytest.raises(InputError, match=r"id -2\b.*0 … 22"):
        model(random_source_ids(1, 3, 5), torch.full((3, 7), -2))


def test_a_state_of_another_batch_is_rejected(model, unchecked):
    start = model.encode(random_source_ids(1, 2, 5))
    with pytest.raises(ShapeError, match=r"state\b.*\b2\b.*ids\b.*\b3\b"):
        model.decode(random_ids(1, 3, 7), start.source, start.state)


def test_rows_that_cannot_share_the_sources_evenly_are_rejected(model):
    start = model.encode(random_source_ids(1, 2, 5))
    state = tuple(part[:, [0, 0, 1]] for part in start.state)
    with pytest.raises(ShapeError, match=r"\b3\b.*\b2\b"):
        model.decode(random_ids(1, 3, 7), start.source, state)


def test_masks_of_another_shape_are_rejected(model, unchecked):
    with pytest.raises(ShapeError, match=r"attention_mask\b.*\(3, 4\).*\(3, 5\)"):
        model.encode(random_source_ids(1, 3, 5), attention_mask=torch.ones(3, 4, dtype=torch.bool))
