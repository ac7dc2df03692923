"""Which taps a model has, and which of them a pattern means."""

import pytest

from qkv.config import preset
from qkv.errors import TapError
from qkv.inspection import match_taps, named_taps
from qkv.models import build


def test_every_tap_has_the_name_of_its_place():
    names = list(named_taps(build(preset("gpt-nano"))))
    assert names[:2] == ["embedding.tokens", "embedding.sum"]
    assert names[-2:] == ["last_hidden_state", "unembedding.logits"]
    for name in ("resid_pre", "resid_mid", "resid_post", "attention.weights", "feed_forward.hidden"):
        assert f"blocks.1.{name}" in names


@pytest.mark.parametrize(
    ("pattern", "n"),
    [("blocks.0.resid_pre", 1), ("blocks.*.resid_pre", 2), ("*.weights", 2), ("blocks.1.attention.*", 7)],
)
def test_a_pattern_means_every_tap_it_fits(pattern, n):
    assert len(match_taps(build(preset("gpt-nano")), pattern)) == n


def test_a_pattern_tells_encoder_from_decoder():
    model = build(preset("transformer-nano"))
    assert set(match_taps(model, "decoder.*.cross_attention.weights")) == {
        "decoder.blocks.0.cross_attention.weights",
        "decoder.blocks.1.cross_attention.weights",
    }
    assert len(match_taps(model, "encoder.*.weights")) == 2


def test_an_unknown_tap_names_the_nearest_and_how_many_there_are():
    model = build(preset("gpt-nano"))
    message = (
        r"^no tap is named 'blocks\.0\.residual_prae'; did you mean 'blocks\.0\.resid_pre'\?; "
        rf"there are {len(named_taps(model))} taps$"
    )
    with pytest.raises(TapError, match=message):
        match_taps(model, "blocks.0.residual_prae")
