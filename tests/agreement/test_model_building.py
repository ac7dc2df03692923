"""Models built on the meta device, copied or loaded equal the original."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.config import GPTConfig, RNNConfig, Seq2SeqConfig
from qkv.models import build
from tests.agreement.model_strategies import (
    assert_close,
    berts,
    build_random_model,
    gpts,
    random_ids,
    rnns,
    seeds,
    seq2seqs,
)

configs = st.one_of(gpts(), berts(), seq2seqs(), rnns())


def shapes(model):
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@given(configs)
def test_a_model_on_the_meta_device_has_the_names_and_shapes_of_a_real_one(config):
    with torch.device("meta"):
        meta = build(config)
    assert all(parameter.is_meta for parameter in meta.parameters())
    assert shapes(meta) == shapes(build(config))
    assert len(list(meta.parameters())) == len(list(build(config).parameters()))


TIED = {
    "gpt": (
        GPTConfig(vocab_size=23, context_length=29, d_model=10, n_heads=2, n_layers=1),
        lambda model: [model.embedding.token.weight, model.unembedding.weight],
    ),
    "seq2seq": (
        Seq2SeqConfig(
            vocab_size=23, context_length=29, d_model=10, n_heads=2, n_encoder_layers=1, n_decoder_layers=1,
        ),
        lambda model: [
            model.encoder.embedding.token.weight, model.decoder.embedding.token.weight, model.unembedding.weight,
        ],
    ),
    "rnn": (
        RNNConfig(vocab_size=23, d_model=10, tie_embeddings=True),
        lambda model: [model.embedding.weight, model.unembedding.weight],
    ),
}  # fmt: skip


def is_tied(model, tied_weights):
    first, *others = tied_weights(model)
    return all(other is first for other in others)


@pytest.mark.parametrize(("config", "tied_weights"), TIED.values(), ids=TIED.keys())
def test_a_tied_model_is_tied_when_built_copied_and_loaded(config, tied_weights):
    model, other = build(config, seed=1), build(config, seed=2)
    other.load_state_dict(model.state_dict())
    with torch.device("meta"):
        meta = build(config)
    for variant in (model, other, meta, copy.deepcopy(model), copy.deepcopy(model).double()):
        assert is_tied(variant, tied_weights)
    assert_close(tied_weights(other)[-1], tied_weights(model)[0])


@pytest.mark.parametrize(("config", "tied_weights"), TIED.values(), ids=TIED.keys())
def test_an_untied_model_is_not(config, tied_weights):
    changes = {"tie_embeddings": False}
    assert not is_tied(build(config.replace(**changes)), tied_weights)


@given(gpts(), seeds)
def test_a_loaded_model_computes_the_same(config, seed):
    model, other = build_random_model(config, seed), build(config, seed=seed + 1).double().eval()
    other.load_state_dict(model.state_dict())
    ids = random_ids(seed, 3, 7)
    assert torch.equal(model(ids), other(ids))


@given(configs, seeds)
def test_weights_are_a_pure_function_of_the_seed(config, seed):
    first, again, other = (build(config, seed=s).state_dict() for s in (seed, seed, seed + 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@given(st.one_of(gpts(dropout=0.5), berts(dropout=0.5)), seeds)
def test_dropout_is_for_training_alone(config, seed):
    model, ids = build_random_model(config, seed), random_ids(seed, 3, 7)
    assert torch.equal(model(ids), build_random_model(config.replace(dropout=0.0), seed)(ids))
    model.train()
    assert not torch.equal(model(ids), model(ids))
