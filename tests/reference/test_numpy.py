"""The four models compared with an independent float64 NumPy forward pass."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.choices import AttentionKernel, PositionKind
from qkv.config import BERTConfig, GPTConfig, RNNConfig, Seq2SeqConfig
from qkv.models import BERT, GPT, RNNSeq2Seq, Seq2Seq
from qkv.nn import use_attention_kernel
from tests.reference import numpy_models, numpy_recurrent
from tests.reference.config_strategies import (
    CONTEXT_LENGTH,
    arrays,
    bert_configs,
    gpt_configs,
    random_documents,
    random_padding,
    rnn_configs,
    seq2seq_configs,
    with_random_weights,
)

seeds = st.integers(0, 2**32 - 1)
kernels = st.sampled_from(AttentionKernel)
each_kind_of_positions = pytest.mark.parametrize("positions", list(PositionKind))


class Watched(dict):
    """Weights that record which of them were read, because an unread weight is not tested."""

    def __init__(self, weights: dict[str, np.ndarray], *, tied: set[str]) -> None:
        super().__init__(weights)
        self.unread = set(weights) - tied

    def __getitem__(self, name: str) -> np.ndarray:
        self.unread.discard(name)
        return super().__getitem__(name)


def tied_names(model: torch.nn.Module) -> set[str]:
    return set(model.state_dict()) - {name for name, _ in model.named_parameters()}


def assert_agree(ours: torch.Tensor, theirs: np.ndarray, at: np.ndarray | None = None) -> None:
    """Assert agreement within 1e-9 of the largest value, at all positions or only at real tokens."""
    got, expected = ours.detach().numpy(), theirs
    assert got.dtype == np.float64
    assert got.shape == expected.shape
    if at is not None:
        got, expected = got[at], expected[at]
    if got.size:
        assert np.isfinite(expected).all()
        assert np.abs(got - expected).max() <= 1e-9 * np.abs(expected).max()


def assert_all_settings_are_drawn(config: GPTConfig | BERTConfig | Seq2SeqConfig | RNNConfig) -> None:
    """Fails for settings added later until the reference implements them."""
    not_drawn = set(type(config).model_fields) - config.model_fields_set
    derived_now_and_then = {"d_head", "d_value"}
    read_outside_of_the_model = {"family", "init_std", "class_names", "problem_type", "sentence_embedding"}
    assert not_drawn <= derived_now_and_then | read_outside_of_the_model


def drawn_shape(rng: np.random.Generator) -> tuple[int, int]:
    return int(rng.integers(1, 4)), int(rng.integers(1, CONTEXT_LENGTH + 1))


def drawn_masks(rng: np.random.Generator, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """Returns no mask, padding, packed documents, or both."""
    masks = {}
    if rng.random() < 0.5:
        masks["attention_mask"] = random_padding(rng, shape, at_least=0)
    if rng.random() < 0.4:
        masks["documents"] = random_documents(rng, shape)
    return masks


def as_tensors(inputs: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in inputs.items()}


def check_gpt(config: GPTConfig, seed: int, kernel: AttentionKernel) -> None:
    assert_all_settings_are_drawn(config)
    rng = np.random.default_rng(seed)
    model = with_random_weights(GPT(config), rng)
    ids = rng.integers(config.vocab_size, size=drawn_shape(rng))
    masks = drawn_masks(rng, ids.shape)
    weights = Watched(arrays(model), tied=tied_names(model))
    expected = numpy_models.gpt(config.model_dump(), weights, ids, **masks)
    assert not weights.unread
    with use_attention_kernel(model, kernel):
        assert_agree(model(torch.from_numpy(ids), **as_tensors(masks)), expected, masks.get("attention_mask"))


def check_bert(config: BERTConfig, seed: int, kernel: AttentionKernel) -> None:
    assert_all_settings_are_drawn(config)
    rng = np.random.default_rng(seed)
    model = with_random_weights(BERT(config), rng)
    ids = rng.integers(config.vocab_size, size=drawn_shape(rng))
    inputs = drawn_masks(rng, ids.shape)
    at = inputs.get("attention_mask")
    if config.n_segments and rng.random() < 0.7:
        inputs["segments"] = rng.integers(config.n_segments, size=ids.shape)
    weights = Watched(arrays(model), tied=tied_names(model))
    expected = numpy_models.bert(config.model_dump(), weights, ids, **inputs)
    assert not weights.unread
    with use_attention_kernel(model, kernel):
        states = model(torch.from_numpy(ids), **as_tensors(inputs))
    assert_agree(states, expected.pop("states"), at)
    first = None if at is None else at[:, 0]
    heads = {
        "pooled": (model.pooled_output, first),
        "masked_lm": (model.masked_lm_logits, at),
        "next_sentence": (model.next_sentence_logits, first),
        "classes": (model.class_logits, first),
    }
    for name, values in expected.items():
        head, where = heads[name]
        assert_agree(head(states), values, where)


def check_seq2seq(config: Seq2SeqConfig, seed: int, kernel: AttentionKernel) -> None:
    assert_all_settings_are_drawn(config)
    rng = np.random.default_rng(seed)
    model = with_random_weights(Seq2Seq(config), rng)
    batch, n_source = drawn_shape(rng)
    if config.d_patch is None:
        source = rng.integers(config.source_vocab_size, size=(batch, n_source))
    else:
        source = rng.normal(size=(batch, n_source, config.d_patch))
    ids = rng.integers(config.vocab_size, size=(batch, int(rng.integers(1, CONTEXT_LENGTH + 1))))
    masks = {}
    if rng.random() < 0.6:
        masks["source_attention_mask"] = random_padding(rng, (batch, n_source), at_least=0)
    if rng.random() < 0.4:
        masks["attention_mask"] = random_padding(rng, ids.shape, at_least=0)
    weights = Watched(arrays(model), tied=tied_names(model))
    expected = numpy_models.seq2seq(config.model_dump(), weights, source, ids, **masks)
    assert not weights.unread
    with use_attention_kernel(model, kernel):
        got = model(torch.from_numpy(source), torch.from_numpy(ids), **as_tensors(masks))
    assert_agree(got, expected, masks.get("attention_mask"))


def check_rnn(config: RNNConfig, seed: int) -> None:
    assert_all_settings_are_drawn(config)
    rng = np.random.default_rng(seed)
    model = with_random_weights(RNNSeq2Seq(config), rng)
    batch, n_source = drawn_shape(rng)
    source_ids = rng.integers(config.source_vocab_size, size=(batch, n_source))
    ids = rng.integers(config.vocab_size, size=(batch, int(rng.integers(1, CONTEXT_LENGTH + 1))))
    masks = {}
    if rng.random() < 0.7:
        masks["source_attention_mask"] = random_padding(rng, source_ids.shape, at_least=1)
    weights = Watched(arrays(model), tied=tied_names(model))
    expected = numpy_recurrent.rnn_seq2seq(config.model_dump(), weights, source_ids, ids, **masks)
    assert not weights.unread
    got = model(torch.from_numpy(source_ids), torch.from_numpy(ids), **as_tensors(masks))
    assert_agree(got, expected)


@each_kind_of_positions
@settings(max_examples=8)
@given(st.data(), seeds, kernels)
def test_gpt_equals_the_numpy_reference(positions, data, seed, kernel):
    check_gpt(data.draw(gpt_configs(positions)), seed, kernel)


@each_kind_of_positions
@settings(max_examples=8)
@given(st.data(), seeds, kernels)
def test_bert_and_its_heads_equal_the_numpy_reference(positions, data, seed, kernel):
    check_bert(data.draw(bert_configs(positions)), seed, kernel)


@each_kind_of_positions
@settings(max_examples=8)
@given(st.data(), seeds, kernels)
def test_the_encoder_decoder_equals_the_numpy_reference(positions, data, seed, kernel):
    check_seq2seq(data.draw(seq2seq_configs(positions)), seed, kernel)


@given(rnn_configs(), seeds)
def test_the_rnn_equals_the_numpy_reference(config, seed):
    check_rnn(config, seed)


@pytest.mark.long
@settings(max_examples=500)
@given(gpt_configs(), seeds, kernels)
def test_500_gpts_equal_the_numpy_reference(config, seed, kernel):
    check_gpt(config, seed, kernel)


@pytest.mark.long
@settings(max_examples=500)
@given(bert_configs(), seeds, kernels)
def test_500_berts_equal_the_numpy_reference(config, seed, kernel):
    check_bert(config, seed, kernel)


@pytest.mark.long
@settings(max_examples=500)
@given(seq2seq_configs(), seeds, kernels)
def test_500_encoder_decoders_equal_the_numpy_reference(config, seed, kernel):
    check_seq2seq(config, seed, kernel)


@pytest.mark.long
@settings(max_examples=500)
@given(rnn_configs(), seeds)
def test_500_rnns_equal_the_numpy_reference(config, seed):
    check_rnn(config, seed)
