"""Tests of weight initialization."""

import pytest
import torch
from torch import nn

from qkv.config import preset
from qkv.models import build
from qkv.models.stack import init_weights

FAMILIES = ["gpt-nano", "bert-nano", "transformer-nano", "t5-small", "rnn-nano"]


def small(name: str, **changes):
    shape = {"d_model": 128, "n_heads": 2, "d_ff": 256, "vocab_size": 211}
    return preset(name, **(changes | (shape if name != "rnn-nano" else {"d_model": 128})))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_seed_gives_the_same_weights_and_another_gives_others(name):
    torch.manual_seed(1)  # the global seed must not matter
    weights = build(small(name), seed=3).state_dict()
    torch.manual_seed(2)
    same = build(small(name), seed=3).state_dict()
    other = build(small(name), seed=4).state_dict()
    assert all(torch.equal(weights[key], same[key]) for key in weights)
    assert not any(torch.equal(weights[key], other[key]) for key in weights if weights[key].ndim == 2)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("std", [0.02, 0.3])
def test_matrices_have_the_requested_std_biases_are_0_and_norms_are_1(name, std):
    model = build(small(name, init_std=std))
    n_writes = 2 * model.config.n_layers if name == "gpt-nano" else 1
    for key, parameter in model.state_dict().items():
        if "norm" in key and key.endswith("weight"):
            assert bool((parameter == 1).all()), key
        elif ".bias" in key or "bias_" in key:
            assert bool((parameter == 0).all()), key
        else:
            is_write = key.endswith((".out_proj.weight", ".down_proj.weight"))
            expected = std / n_writes**0.5 if is_write else std
            # Four standard errors of the sample standard deviation.
            assert abs(float(parameter.std()) - expected) < 4 * expected / (2 * parameter.numel()) ** 0.5, key
            assert abs(float(parameter.mean())) < 4 * expected / parameter.numel() ** 0.5, key


def test_a_tied_table_is_initialized_once_and_stays_tied():
    model = build(small("gpt-nano"))
    assert model.unembedding.weight is model.embedding.token.weight
    assert sum(name.endswith(("token.weight", "unembedding.weight")) for name, _ in model.named_parameters()) == 1
    # The first table is the same whether tied or not, because no values are drawn for a tied table.
    untied = build(small("gpt-nano", tie_embeddings=False))
    assert torch.equal(untied.embedding.token.weight, model.embedding.token.weight)
    assert torch.equal(untied.blocks[1].feed_forward.down_proj.weight, model.blocks[1].feed_forward.down_proj.weight)
    assert not torch.equal(untied.unembedding.weight, untied.embedding.token.weight)


def test_a_model_on_the_meta_device_is_left_as_it_is():
    with torch.device("meta"):
        model = build(small("gpt-nano"))
    assert all(parameter.is_meta for parameter in model.parameters())


def test_residual_writes_have_a_smaller_std():
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleDict({"out_proj": nn.Linear(300, 300), "q_proj": nn.Linear(300, 300)})

    part = Part()
    init_weights(part, std=0.1, n_residual_writes=25)
    assert float(part.inner["out_proj"].weight.detach().std()) == pytest.approx(0.02, rel=0.02)
    assert float(part.inner["q_proj"].weight.detach().std()) == pytest.approx(0.1, rel=0.02)
