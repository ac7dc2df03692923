"""Cost plots have four panels and mark the crossover correctly."""

import pytest

from qkv.config import preset
from qkv.cost import estimate
from qkv.cost.devices import DEVICES
from qkv.inspection.cost_figures import plot_cost_overview


@pytest.mark.parametrize(
    ("name", "mode"), [("gpt-nano", "train"), ("gpt2", "decode"), ("bert-nano", "forward"), ("rnn-nano", "forward")]
)
def test_every_family_has_four_panels(name, mode):
    axes = plot_cost_overview(estimate(preset(name), batch_size=2, seq_len=64, mode=mode), DEVICES["h200"]).axes
    assert len(axes) == 4
    assert "NVIDIA H200" in axes[0].get_title()
    assert "RNN" in axes[3].get_title()


@pytest.mark.parametrize(("name", "label"), [("gpt2", "n = 4,608 = 6d"), ("transformer-base", "n = 3,072 = 6d")])
def test_the_two_lines_cross_at_the_marked_crossover(name, label):
    _, against_length, _, _ = plot_cost_overview(estimate(preset(name), batch_size=1, seq_len=64), DEVICES["l4"]).axes
    assert any(label in text.get_text() for text in against_length.texts)
    rest, core, at = against_length.lines
    ratios = [above / below for above, below in zip(core.get_ydata(), rest.get_ydata(), strict=True)]
    under = max(n for n, ratio in zip(rest.get_xdata(), ratios, strict=True) if ratio < 1)
    over = min(n for n, ratio in zip(rest.get_xdata(), ratios, strict=True) if ratio >= 1)
    assert under < at.get_xdata()[0] <= over
