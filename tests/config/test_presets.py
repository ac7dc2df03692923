"""Presets have the published numbers of parameters."""

import pytest
import torch

from qkv.config import PRESETS, preset
from qkv.errors import ConfigError
from qkv.models import build
from qkv.nn import Attention


def build_on_meta(config):
    with torch.device("meta"):
        return build(config)


def n_parameters(config):
    return sum(parameter.numel() for parameter in build_on_meta(config).parameters())


@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("gpt3", 174_604_259_328),  # (50257 + 2048)d + 96(12d² + 13d) + 2d; the paper rounds it to 175B
        ("llama-2-7b", 6_738_415_616),
        ("llama-3-8b", 8_030_261_248),
        ("bert-tiny", 4_385_920),
        ("bert-small", 28_763_648),
        ("bert-medium", 41_373_184),
        ("bert-base", 109_482_240),
        ("bert-base-cased", 108_310_272),
        ("bert-base-zh", 102_267_648),
        ("bert-base-multi", 177_853_440),
        ("bert-large", 335_141_888),
        ("transformer-base", 63_045_632),
        ("transformer-big", 214_171_648),
        ("t5-small", 60_506_624),
    ],
)
def test_a_preset_has_the_published_number_of_parameters(name, n):
    assert n_parameters(preset(name)) == n


def test_gpt2_without_biases_has_fewer_parameters():
    bare = preset("gpt2", attention_bias=False, feed_forward_bias=False, norm_bias=False)
    assert n_parameters(bare) == 124_337_664


def test_gpt3_has_four_d_squared_attention_weights_per_layer():
    """The formula in lecture C is missing a factor of 4."""
    attentions = [module for module in build_on_meta(preset("gpt3")).modules() if isinstance(module, Attention)]
    weights = sum(
        projection.weight.numel()
        for attention in attentions
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj)
    )
    assert len(attentions) == 96
    assert weights == 4 * 96 * 12288**2 == 57_982_058_496


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_built_on_the_meta_device(name):
    model = build_on_meta(preset(name))
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("name", [name for name in PRESETS if name.endswith("-nano")])
def test_nano_presets_have_fewer_than_half_a_million_parameters(name):
    assert n_parameters(preset(name)) < 500_000


def test_fields_of_a_preset_can_be_changed():
    config = preset("gpt2", context_length=256, n_layers=3)
    assert (config.context_length, config.n_layers, config.d_model) == (256, 3, 768)
    assert preset("gpt2", d_model=48).d_ff == 192


def test_the_error_for_an_unknown_preset_contains_the_closest_and_all_presets():
    with pytest.raises(ConfigError, match=r"'gtp2'.*'gpt2'.*gpt-nano, gpt2,"):
        preset("gtp2")


def test_an_unknown_field_is_an_error():
    with pytest.raises(ConfigError, match=r"gpt: .*'n_layer'.*'n_layers'"):
        preset("gpt2", n_layer=3)
