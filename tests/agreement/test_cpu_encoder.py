"""The prepacked CPU encoder agrees with the eager implementation, which is used for unsupported models."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as trying

from qkv.accel.cpu.encoder import create_cpu_encoder
from qkv.accel.cpu.prepacked_weights import PrepackedWeights
from qkv.choices import Activation
from qkv.config import BERTConfig
from qkv.inspection import record
from tests.agreement.model_strategies import VOCABULARY, berts, build_random_model, seeds

LENGTHS = [7, 1, 5]
USUAL = {"positions": "learned", "gated": False, "sliding_window": None, "head_combination": "split"}
WIDE = BERTConfig(
    vocab_size=VOCABULARY, context_length=29, d_model=132, n_heads=3, n_layers=2, d_ff=1013, n_segments=2
)  # fmt: skip
"""Matrices large enough for oneDNN with a fused activation."""


def random_batch(seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=generator)
    return ids, torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]


def assert_agrees(model, seed):
    ids, attention_mask = random_batch(seed)
    segments = torch.zeros_like(ids)
    if model.embedding.segment is not None:
        segments[:, 3:] = 1
    encoder = create_cpu_encoder(model, PrepackedWeights(model))
    assert encoder is not None
    for options in (
        {},
        {"attention_mask": attention_mask},
        {"segments": segments if model.embedding.segment is not None else None},
    ):
        actual, expected = encoder(ids, **options), model(ids, **options)
        rows = attention_mask if "attention_mask" in options else torch.ones_like(attention_mask)
        torch.testing.assert_close(actual[rows], expected[rows], rtol=1e-4, atol=2e-5)


@trying(max_examples=25)
@given(berts(**USUAL, d_value=4), seeds)
@torch.no_grad()
def test_states_agree_with_eager_with_and_without_padding(config, seed):
    assert_agrees(build_random_model(config, seed).float().eval(), seed)


@pytest.mark.parametrize("activation", list(Activation))
@torch.no_grad()
def test_states_of_a_wide_model_with_fused_activation_agree(activation):
    assert_agrees(build_random_model(WIDE.replace(activation=activation), 3).float().eval(), 3)


@pytest.mark.parametrize(
    "change",
    [{"positions": "rotary"}, {"sliding_window": 3}, {"gated": True}, {"head_combination": "pooled", "d_value": 132}],
)
@torch.no_grad()
def test_unsupported_configs_use_the_eager_implementation(change):
    model = build_random_model(WIDE.replace(**change), 3).float().eval()
    assert create_cpu_encoder(model, PrepackedWeights(model)) is None


def test_gradients_training_and_hooks_use_the_eager_implementation():
    model = build_random_model(WIDE, 3).float().eval()
    packing = PrepackedWeights(model)
    assert create_cpu_encoder(model, packing) is None
    with torch.no_grad():
        assert create_cpu_encoder(model, packing) is not None
        with record(model, "blocks.1.resid_mid"):
            assert create_cpu_encoder(model, packing) is None
        assert create_cpu_encoder(model.train(), packing) is None
