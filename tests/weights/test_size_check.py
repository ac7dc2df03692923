"""Configs that are far larger than the tensors are rejected before allocating memory."""

import pytest
import torch

from qkv.config import BERTConfig, Seq2SeqConfig
from qkv.errors import WeightsError
from qkv.weights.model_loader import build_unless_config_exceeds_tensors

SMALL = BERTConfig(vocab_size=31, context_length=13, d_model=14, n_heads=2, n_layers=2)


def test_a_model_is_built_if_only_a_few_tensors_are_missing():
    tensors = dict(
        build_unless_config_exceeds_tensors(SMALL, {str(i): torch.zeros(10_000) for i in range(2)}).named_parameters()
    )
    assert build_unless_config_exceeds_tensors(SMALL, tensors).config == SMALL
    tensors.popitem()
    assert build_unless_config_exceeds_tensors(SMALL, tensors).config == SMALL


def test_a_config_that_is_too_wide_is_rejected_with_both_sizes():
    with pytest.raises(WeightsError, match=r"[\d,]{15,} parameters.*\b21\b"):
        build_unless_config_exceeds_tensors(
            SMALL.replace(vocab_size=10**12), {"a": torch.zeros(7), "b": torch.zeros(14)}
        )


def test_more_layers_than_tensors_are_rejected_with_both_counts():
    with pytest.raises(WeightsError, match=r"1,000,000 layers.*\b1 tensors"):
        build_unless_config_exceeds_tensors(SMALL.replace(n_layers=10**6), {"a": torch.zeros(7)})
    config = Seq2SeqConfig(
        vocab_size=31, context_length=13, d_model=14, n_heads=2, n_encoder_layers=3, n_decoder_layers=5
    )
    with pytest.raises(WeightsError, match=r"\b8 layers.*\b7 tensors"):
        build_unless_config_exceeds_tensors(config, {str(i): torch.zeros(10_000) for i in range(7)})
