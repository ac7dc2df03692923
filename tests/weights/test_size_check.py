"""A config that asks for far more than its file holds is refused before any memory is taken."""

import pytest
import torch

from qkv.config import BERTConfig, Seq2SeqConfig
from qkv.errors import WeightsError
from qkv.weights.size_check import build_size_checked

SMALL = BERTConfig(vocab_size=31, context_length=13, d_model=14, n_heads=2, n_layers=2)


def test_a_model_is_built_for_its_own_tensors_and_for_those_that_lack_a_few():
    tensors = dict(build_size_checked(SMALL, {str(i): torch.zeros(10_000) for i in range(2)}).named_parameters())
    assert build_size_checked(SMALL, tensors).config == SMALL
    tensors.popitem()
    assert build_size_checked(SMALL, tensors).config == SMALL


def test_a_width_that_no_memory_holds_is_refused_with_both_numbers():
    with pytest.raises(
        WeightsError, match=r"the config describes [\d,]{15,} parameters, and the tensors hold 21 numbers"
    ):
        build_size_checked(SMALL.replace(vocab_size=10**12), {"a": torch.zeros(7), "b": torch.zeros(14)})


def test_more_layers_than_tensors_are_refused_with_both_numbers():
    with pytest.raises(WeightsError, match="the config has 1,000,000 layers, and there are 1 tensors"):
        build_size_checked(SMALL.replace(n_layers=10**6), {"a": torch.zeros(7)})
    pair = Seq2SeqConfig(
        vocab_size=31, context_length=13, d_model=14, n_heads=2, n_encoder_layers=3, n_decoder_layers=5
    )
    with pytest.raises(WeightsError, match="the config has 8 layers, and there are 7 tensors"):
        build_size_checked(pair, {str(i): torch.zeros(10_000) for i in range(7)})
