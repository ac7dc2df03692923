"""Defaults and checks of sampling and beam search configs."""

import pytest

from qkv.config import BeamConfig, SamplingConfig
from qkv.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"temperature": -1}, r"temperature=-1: .*\b0\b"),
        ({"temperature": float("nan")}, "temperature=nan: .*finite"),
        ({"top_k": 0}, r"top_k=0: .*\b1\b"),
        ({"top_p": 0}, r"top_p=0: .*\b0\b"),
        ({"top_p": 1.01}, r"top_p=1\.01: .*\b1\b"),
        ({"min_p": -0.1}, r"min_p=-0\.1: .*\b0\b"),
        ({"typical_p": 0}, r"typical_p=0: .*\b0\b"),
        ({"repetition_penalty": 0}, r"repetition_penalty=0: .*\b0\b"),
        ({"seed": -1}, r"seed=-1: .*\b0\b"),
        ({"topk": 5}, "'topk'.*'top_k'"),
    ],
)
def test_invalid_sampling_settings_are_errors(settings, pattern):
    with pytest.raises(ConfigError, match=pattern):
        SamplingConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"n_beams": 0}, r"n_beams=0: .*\b1\b"),
        ({"n_beams": 100_000}, r"n_beams=100000: .*\b1024\b"),
        ({"n_beams": 2, "n_best": 3}, "n_best=3 .*n_beams=2"),
        ({"n_beams": 2, "length_penalty": float("inf")}, "length_penalty=inf: .*finite"),
        ({}, "n_beams "),
    ],
)
def test_invalid_beam_search_settings_are_errors(settings, pattern):
    with pytest.raises(ConfigError, match=pattern):
        BeamConfig(**settings)


def test_the_default_settings_do_not_modify_the_distribution():
    assert SamplingConfig().model_dump() == {
        "temperature": 1.0, "top_k": None, "top_p": None, "min_p": None, "typical_p": None,
        "repetition_penalty": 1.0, "seed": 0,
    }  # fmt: skip
