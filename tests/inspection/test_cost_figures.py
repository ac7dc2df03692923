"""Costs drawn: four panels, with the crossing where it is."""

import pytest

from qkv.config import preset
from qkv.cost import estimate
from qkv.cost.devices import DEVICES
from qkv.inspection.cost_figures import cost_figure


@pytest.mark.parametrize(
    ("name", "mode"), [("gpt-nano", "train"), ("gpt2", "decode"), ("bert-nano", "forward"), ("rnn-nano", "forward")]
)
def test_every_family_has_its_four_panels(name, mode):
    axes = cost_figure(estimate(preset(name), batch=2, length=64, mode=mode), DEVICES["h200"]).axes
    assert len(axes) == 4
    assert "Roofline of the NVIDIA H200" in axes[0].get_title()
    assert "RNN against self-attention" in axes[3].get_title()


def test_the_crossing_is_drawn_at_six_widths():
    _, against_length, _, _ = cost_figure(
        estimate(preset("gpt2"), batch=1, length=64, mode="forward"), DEVICES["l4"]
    ).axes
    assert any("n = 4,608 = 6d" in text.get_text() for text in against_length.texts)
