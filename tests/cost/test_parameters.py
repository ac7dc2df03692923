"""Parameter counts computed from a config equal those of the built model."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.config import PRESETS, GPTConfig, preset
from qkv.cost import count_parameters
from qkv.models import build
from tests.cost.config_strategies import FAMILIES


def count_built_parameters(config) -> dict[str, int]:
    """Parameter counts of the built model by name, without layer indices."""
    with torch.device("meta"):
        model = build(config)
    by_name = {}
    for name, parameter in model.named_parameters():
        path = re.sub(r"\.\d+", "", name)
        by_name[path] = by_name.get(path, 0) + parameter.numel()
    return by_name


def find_part(name: str, parts) -> str:
    """Return the longest part that is a prefix of the name of a parameter."""
    return max((part for part in parts if f"{name}.".startswith(f"{part}.")), key=len)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_equals_the_built_model_for_random_configs(family):
    @settings(max_examples=50)
    @given(FAMILIES[family])
    def check(config):
        estimated, actual = count_parameters(config), count_built_parameters(config)
        assert estimated.total == sum(actual.values())
        by_part = dict.fromkeys(estimated.by_part, 0)
        for name, count in actual.items():
            by_part[find_part(name, by_part)] += count
        assert estimated.by_part == by_part

    check()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_equal_the_built_model(name):
    assert count_parameters(preset(name)).total == sum(count_built_parameters(preset(name)).values())


@given(st.integers(1, 7), st.integers(1, 11))
def test_a_layer_has_12_d_squared_parameters(n_heads, width):
    d = n_heads * width
    config = GPTConfig(
        vocab_size=5,
        context_length=3,
        d_model=d,
        n_heads=n_heads,
        n_layers=1,
        attention_bias=False,
        feed_forward_bias=False,
    )
    result = count_parameters(config)
    assert (result.count_matching("attention"), result.count_matching("feed_forward")) == (4 * d * d, 8 * d * d)


def test_a_config_with_more_than_1e15_parameters_can_be_counted():
    config = GPTConfig(vocab_size=10**6, context_length=10**6, d_model=10**6, n_heads=1000, n_layers=100)
    assert count_parameters(config).total > 10**15
