"""The RNN encoder–decoder: shapes, single steps, what is refused."""

import pytest
import torch

from qkv.choices import CellKind, ScoreKind
from qkv.config import RNNConfig
from qkv.errors import ContextLengthError, InputError, ShapeError
from tests.agreement.families import close, shaken, some_ids, some_source

SMALL = {"vocab_size": 23, "source_vocab_size": 19, "d_model": 10, "context_length": 11}


@pytest.fixture
def model():
    return shaken(RNNConfig(**SMALL))


@pytest.mark.parametrize("cell", CellKind)
@pytest.mark.parametrize("attention", ScoreKind)
@pytest.mark.parametrize("n_layers", [1, 3])
def test_every_target_position_gets_a_logit_for_every_token(cell, attention, n_layers):
    config = RNNConfig(**SMALL, cell=cell, attention=attention, n_decoder_layers=n_layers, n_encoder_layers=2)
    model = shaken(config)
    assert model(some_source(1, 3, 5), some_ids(1, 3, 7)).shape == (3, 7, 23)
    state = model.encode(some_source(1, 3, 5)).state
    assert [part.shape for part in state] == [(n_layers, 3, 10)] * (1 if cell is CellKind.GRU else 2)


@pytest.mark.parametrize("cell", CellKind)
def test_a_single_step_goes_on_from_a_state(cell):
    model = shaken(RNNConfig(**SMALL, cell=cell, n_decoder_layers=2))
    source, ids = some_source(1, 3, 5), some_ids(1, 3, 7)
    start = model.encode(source)
    state, steps = start.state, []
    for t in range(7):
        logits, state = model.decode(ids[:, t : t + 1], start.source, state)
        assert logits.shape == (3, 1, 23)
        steps.append(logits)
    close(torch.cat(steps, dim=1), model(source, ids))


def test_without_attention_the_decoder_sees_the_first_state_alone():
    model = shaken(RNNConfig(**SMALL, attention=ScoreKind.NONE))
    ids, start = some_ids(1, 3, 7), model.encode(some_source(1, 3, 5))
    other = model.encode(some_source(9, 3, 5))
    close(model.decode(ids, start.source, start.state)[0], model.decode(ids, other.source, start.state)[0])


@pytest.mark.parametrize("attention", [ScoreKind.DOT, ScoreKind.GENERAL, ScoreKind.ADDITIVE])
def test_with_attention_it_sees_every_source_state(attention):
    model = shaken(RNNConfig(**SMALL, attention=attention))
    ids, start = some_ids(1, 3, 7), model.encode(some_source(1, 3, 5))
    for position in range(5):
        states = start.source.states.clone()
        states[:, position] += 1.0
        changed = model.decode(ids, type(start.source)(states=states), start.state)[0]
        difference = changed - model.decode(ids, start.source, start.state)[0]
        assert difference.abs().amax((0, 2)).min() > 1e-9


def test_a_source_without_tokens_is_refused(model):
    attention_mask = torch.tensor([[True] * 5, [False] * 5, [True] * 5])
    with pytest.raises(InputError, match="row 1 of the source has 0 tokens, there must be at least 1"):
        model(some_source(1, 3, 5), some_ids(1, 3, 7), source_attention_mask=attention_mask)


def test_more_tokens_than_the_context_are_refused(model):
    with pytest.raises(ContextLengthError, match="12 tokens, but the model's context_length is 11"):
        model(some_source(1, 3, 12), some_ids(1, 3, 7))
    with pytest.raises(ContextLengthError, match="13 tokens, but the model's context_length is 11"):
        model(some_source(1, 3, 5), some_ids(1, 3, 13))


def test_ids_outside_the_vocabulary_are_refused(model):
    with pytest.raises(InputError, match="id 19 is outside the vocabulary of 19"):
        model(torch.full((3, 5), 19), some_ids(1, 3, 7))
    with pytest.raises(InputError, match="id -2 is outside the vocabulary of 23"):
        model(some_source(1, 3, 5), torch.full((3, 7), -2))


def test_a_state_of_another_batch_is_refused(model, unchecked):
    start = model.encode(some_source(1, 2, 5))
    with pytest.raises(ShapeError, match="the state is of 2 rows, the ids have 3"):
        model.decode(some_ids(1, 3, 7), start.source, start.state)


def test_rows_that_cannot_share_the_sources_evenly_are_refused(model):
    start = model.encode(some_source(1, 2, 5))
    state = tuple(part[:, [0, 0, 1]] for part in start.state)
    with pytest.raises(ShapeError, match="3 rows of ids cannot share 2 sources evenly"):
        model.decode(some_ids(1, 3, 7), start.source, state)


def test_marks_of_another_shape_are_refused(model, unchecked):
    with pytest.raises(ShapeError, match=r"attention_mask has shape \(3, 4\), ids \(3, 5\)"):
        model.encode(some_source(1, 3, 5), attention_mask=torch.ones(3, 4, dtype=torch.bool))
