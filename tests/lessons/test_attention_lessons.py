"""The lessons on attention, inputs and masks print the correct numbers."""

import itertools
import re

import pytest

from qkv.lessons import shapes
from qkv.lessons.heat_maps import SLIDE_LAST_ROW
from qkv.lessons.sentences import BEST_LOSS


def test_a_soft_dictionary_returns_a_value_where_a_dict_raises(run_lesson):
    text = run_lesson("soft-dictionary")
    assert "KeyError: 'south-east'" in text.text
    # A query of length 0 returns the mean of 5, 12, 25 and 15; a very long one returns the value of the key east.
    assert text.numbers("0 ")[-1] == 14.25
    assert text.numbers("100 ")[-1] == 12.0
    for length in ("0 ", "1 ", "3 ", "10 ", "100 "):
        *weights, total, _ = text.numbers(length)
        assert sum(weights) == pytest.approx(1.0, abs=2e-4)
        assert total == 1.0
    assert [text.numbers(f"value #{i}")[0] for i in range(1, 5)] == [0.30, 0.50, 0.15, 0.05]


def test_without_the_root_of_d_scores_spread_with_the_width_and_gradients_vanish(run_lesson):
    text = run_lesson("why-sqrt-d")
    slopes = []
    for width in (4, 16, 64, 256, 1024, 4096):
        plain, scaled, _, largest, slope, scaled_slope = text.numbers(f"{width:5,} ")
        assert plain == pytest.approx(width, rel=0.5)
        assert scaled == pytest.approx(1.0, rel=0.3)
        assert largest < 0.3
        assert scaled_slope > 0.25
        slopes.append(slope)
    assert slopes == sorted(slopes, reverse=True)
    assert slopes[-1] < 0.05
    assert text.numbers("  weights")[0] == 0.9999999
    assert text.numbers("  weights", which=1)[:2] == [0.8807906, 0.1192020]


def test_the_walkthrough_prints_the_exact_weights_and_those_of_the_slide(run_lesson):
    text = run_lesson("walkthrough")
    rows = [text.numbers(f"{i} ", which=1) for i in range(1, 5)]
    assert [row[0] for row in rows] == [112, 96, 16, 8]
    assert [row[1] for row in rows] == [14, 12, 2, 1]
    assert [row[3] for row in rows] == [0.8808, 0.1192, 0.0, 0.0]
    assert [row[4] for row in rows[2:]] == [5.41e-06, 1.99e-06]
    assert [row[5] for row in rows] == [0.87, 0.12, 0.01, 0.0]
    assert text.row("z₁ (sum)") == text.row("z₁ (Attention)")
    assert text.row("q₁") == ["112", "96", "16", "8"]
    for query in "₁₂₃₄":
        assert sum(text.numbers(f"q{query}", which=1)) == pytest.approx(1.0, abs=3e-4)


def test_shapes_are_those_of_the_lecture(run_lesson, monkeypatch):
    times = itertools.cycle([0.004, 0.001])
    monkeypatch.setattr(shapes, "best_of_n_seconds", lambda _work: next(times))
    text = run_lesson("shapes")
    assert text.row("queries Q") == ["x·W_Q", "T×d", "1×1×5×16", "1×1×5×16", "3×4×5×4"]
    assert text.row("keys K") == ["source·W_K", "T̄×d", "1×1×5×16", "1×1×7×16", "3×4×7×4"]
    assert text.row("scores") == ["Q·Kᵀ/√d", "T×T̄", "1×1×5×5", "1×1×5×7", "3×4×5×7"]
    assert text.row("output") == ["·W_O", "T×d", "1×5×16", "1×5×16", "3×5×16"]
    assert text.numbers("1,024") == [4.0, 1.0, 4.0]


def test_heat_maps_agree_with_the_slide_and_query_3_attends_to_keys_0_to_3(run_lesson):
    text = run_lesson("heat-maps")
    assert re.search(r"Query 3\b.*\b0, 1, 2, 3\.", text.text)
    assert text.text.count("?") >= 12
    computed = text.numbers("computed")
    legible = [
        (computed_weight, slide)
        for computed_weight, slide in zip(computed, SLIDE_LAST_ROW, strict=True)
        if slide == slide
    ]
    assert len(legible) == 10
    assert all(computed_weight == slide for computed_weight, slide in legible)
    # The third table with these rows contains the probabilities.
    for query in range(12):
        weights = text.numbers(f"{query} ", which=2)
        assert sum(weights) == pytest.approx(1.0, abs=0.03)
        assert set(weights[query + 1 :]) <= {0.0}
    assert text.row("q3", which=0) == ["q3·k1", "q3·k2", "q3·k3", "−∞", "−∞"]


def test_only_the_correct_mask_hides_later_tokens(run_lesson):
    text = run_lesson("wrong-masks")
    names = {
        "correct": "correct: −∞ added before the softmax",
        "zeros": "(i) scores × 0/1, then softmax",
        "product": "(ii) scores × −∞, then softmax",
        "after": "(iii) softmax, then × 0/1",
        "repaired": "(iii) renormalized",
    }
    changes = {key: text.numbers(name)[0] for key, name in names.items()}
    assert changes["correct"] == changes["repaired"] == 0.0
    assert changes["zeros"] > 0.01
    assert changes["after"] > 0.01
    in_training, in_generation = (
        {key: float(text.row(name, which=1)[i]) for key, name in names.items()} for i in (0, 1)
    )
    assert in_training["correct"] == pytest.approx(BEST_LOSS, abs=0.05)
    assert in_generation["correct"] == pytest.approx(BEST_LOSS, abs=0.05)
    assert in_training["repaired"] == pytest.approx(in_training["correct"], abs=0.01)
    assert in_training["zeros"] < 0.1 < 2 < in_generation["zeros"]
    assert in_training["after"] < BEST_LOSS - 0.2 < 2 < in_generation["after"]
    assert text.row(names["product"], which=1)[0] == "NaN"


def test_without_a_mask_the_model_copies_and_cannot_generate(run_lesson):
    text = run_lesson("no-causal-mask")
    causal, unmasked = (text.row(name, which=1) for name in ("causal mask", "no mask"))
    assert [float(loss) for loss in causal[:2]] == pytest.approx([BEST_LOSS, BEST_LOSS], abs=0.03)
    assert causal[0] == causal[1]
    assert float(unmasked[0]) < 0.02
    assert float(unmasked[1]) > 1.5
    assert float(causal[2].removesuffix("%")) > 90
    assert float(unmasked[2].removesuffix("%")) < 50


def test_head_layouts_agree_and_their_weights_are_counted(run_lesson):
    text = run_lesson("head-layouts")
    for implementation in ("a loop over heads", "stacked matrices of all heads"):
        assert float(text.row(implementation)[-1]) < 1e-6
    d, counts = 512, (1, 2, 4, 8, 16)
    assert text.numbers("split           4d²") == [4 * d * d] * 5
    assert text.numbers("pooled, no W_O  (2+h)d²") == [(2 + h) * d * d for h in counts]
    assert text.numbers("pooled          (2+h)d² + d²") == [(3 + h) * d * d for h in counts]
    assert text.numbers("free, d_v = d   2d² + 2hd²") == [(2 + 2 * h) * d * d for h in counts]
    assert "agree in every cell: True" in text.text
    assert "14,495,514,624" in text.text
    assert "57,982,058,496" in text.text


def test_a_one_hot_product_is_a_lookup(run_lesson):
    text = run_lesson("one-hot")
    assert len(re.findall(r"identical[^.]*: True", text.text)) == 2
    assert text.row("W·X") == ["10×1", *text.row("column 7 of W")[1:]] == ["10×1", *text.row("lookup")[1:]]
    assert "4×16,000 · 16,000×8 =" in text.text
    assert len(text.numbers("row 10532 (all)")) == 8
    assert text.numbers("product")[0] == 2 * 4 * 16_000 * 8
