"""Taps are found by name and by pattern."""

import pytest

from qkv.config import preset
from qkv.errors import TapError
from qkv.inspection import match_taps, named_taps
from qkv.models import build


def test_every_tap_is_named_by_its_module_path():
    names = list(named_taps(build(preset("gpt-nano"))))
    assert names[:2] == ["embedding.tokens", "embedding.sum"]
    assert names[-2:] == ["last_hidden_state", "unembedding.logits"]
    for name in ("resid_pre", "resid_mid", "resid_post", "attention.weights", "feed_forward.hidden"):
        assert f"blocks.1.{name}" in names


@pytest.mark.parametrize(
    ("pattern", "n"),
    [("blocks.0.resid_pre", 1), ("blocks.*.resid_pre", 2), ("*.weights", 2), ("blocks.1.attention.*", 7)],
)
def test_a_pattern_matches_all_of_its_taps(pattern, n):
    assert len(match_taps(build(preset("gpt-nano")), pattern)) == n


def test_a_pattern_distinguishes_encoder_and_decoder():
    model = build(preset("transformer-nano"))
    assert set(match_taps(model, "decoder.*.cross_attention.weights")) == {
        "decoder.blocks.0.cross_attention.weights",
        "decoder.blocks.1.cross_attention.weights",
    }
    assert len(match_taps(model, "encoder.*.weights")) == 2


def test_an_unknown_tap_suggests_the_closest_one_and_counts_the_taps():
    model = build(preset("gpt-nano"))
    message = rf"\b{len(named_taps(model))} taps.*'blocks\.0\.resid_prae'.*'blocks\.0\.resid_pre'"
    with pytest.raises(TapError, match=message):
        match_taps(model, "blocks.0.resid_prae")
