"""Parameters from a config are the parameters of the model that it describes."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.config import PRESETS, GPTConfig, preset
from qkv.cost import parameters
from qkv.models import build
from tests.cost.drawn import FAMILIES


def counted(config) -> dict[str, int]:
    """The real model's parameters by name, layer numbers left out."""
    with torch.device("meta"):
        model = build(config)
    by_name = {}
    for name, parameter in model.named_parameters():
        place = re.sub(r"\.\d+", "", name)
        by_name[place] = by_name.get(place, 0) + parameter.numel()
    return by_name


def owner(name: str, parts) -> str:
    """The longest part that a parameter's name begins with."""
    return max((part for part in parts if f"{name}.".startswith(f"{part}.")), key=len)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_equals_the_model_s_own_for_random_configs(family):
    @settings(max_examples=50)
    @given(FAMILIES[family])
    def check(config):
        ours, real = parameters(config), counted(config)
        assert ours.total == sum(real.values())
        by_part = dict.fromkeys(ours.by_part, 0)
        for name, count in real.items():
            by_part[owner(name, by_part)] += count
        assert ours.by_part == by_part

    check()


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_counted_right(name):
    assert parameters(preset(name)).total == sum(counted(preset(name)).values())


@given(st.integers(1, 7), st.integers(1, 11))
def test_a_layer_has_twelve_d_squared(n_heads, width):
    d = n_heads * width
    config = GPTConfig(
        vocab_size=5, context_length=3, d_model=d, n_heads=n_heads, n_layers=1, attention_bias=False,
        feed_forward_bias=False,
    )  # fmt: skip
    found = parameters(config)
    assert (found.of("attention"), found.of("feedforward")) == (4 * d * d, 8 * d * d)


def test_ten_to_the_fifteen_parameters_are_answered_at_once():
    config = GPTConfig(vocab_size=10**6, context_length=10**6, d_model=10**6, n_heads=1000, n_layers=100)
    assert parameters(config).total > 10**15
