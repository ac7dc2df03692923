"""Settings of generation that cannot be are refused in one line with both numbers."""

import pytest

from qkv.config import BeamConfig, SamplingConfig
from qkv.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1}, "temperature=-1: input should be greater than or equal to 0"),
        ({"temperature": float("nan")}, "temperature=nan: input should be a finite number"),
        ({"top_k": 0}, "top_k=0: input should be greater than or equal to 1"),
        ({"top_p": 0}, "top_p=0: input should be greater than 0"),
        ({"top_p": 1.01}, "top_p=1.01: input should be less than or equal to 1"),
        ({"min_p": -0.1}, r"min_p=-0.1: input should be greater than or equal to 0"),
        ({"typical_p": 0}, "typical_p=0: input should be greater than 0"),
        ({"repetition_penalty": 0}, "repetition_penalty=0: input should be greater than 0"),
        ({"seed": -1}, "seed=-1: input should be greater than or equal to 0"),
        ({"topk": 5}, "unknown key 'topk'; did you mean 'top_k'"),
    ],
)
def test_sampling_that_cannot_be_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        SamplingConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_beams": 0}, "n_beams=0: input should be greater than or equal to 1"),
        ({"n_beams": 100_000}, "n_beams=100000: input should be less than or equal to 1024"),
        ({"n_beams": 2, "n_best": 3}, "n_best=3 must be at most n_beams=2"),
        ({"n_beams": 2, "length_penalty": float("inf")}, "length_penalty=inf: input should be a finite number"),
        ({}, "n_beams is missing"),
    ],
)
def test_a_search_that_cannot_be_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        BeamConfig(**settings)


def test_nothing_is_set_unless_given():
    assert SamplingConfig().model_dump() == {
        "temperature": 1.0, "top_k": None, "top_p": None, "min_p": None, "typical_p": None,
        "repetition_penalty": 1.0, "seed": 0,
    }  # fmt: skip
