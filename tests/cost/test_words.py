"""What is said about a model's cost holds, exactly."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.config import GPTConfig, preset
from qkv.cost import Workload, crossing, estimate, layers_compared, operations
from tests.cost.drawn import gpt


def block_flops(config, n, what):
    """(scores and mix, the rest) of a block."""
    block = [one for one in operations(config, Workload(batch=1, length=n)) if one.is_block]
    inside = sum(getattr(one, what) for one in block if one.is_attention_core)
    return inside, sum(one.flops for one in block if not one.is_attention_core)


@settings(max_examples=40)
@given(gpt)
def test_the_crossing_is_the_first_length_at_which_attention_costs_as_much_as_the_rest(config):
    config = config.replace(context_length=10**9)
    found = crossing(config)
    for n, what in ((found.executed, "flops"), (found.useful, "useful_flops")):
        if n is None:
            inside, rest = block_flops(config, 10**6, what)
            assert inside < rest
            continue
        inside, rest = block_flops(config, n, what)
        assert inside >= rest
        if n > 1:
            inside, rest = block_flops(config, n - 1, what)
            assert inside < rest


def test_attention_costs_as_much_as_the_rest_at_6d_executed_and_12d_useful():
    assert (crossing(preset("gpt2")).executed, crossing(preset("gpt2")).useful) == (6 * 768, 12 * 768 - 1)
    said = repr(estimate("gpt2", mode="train"))
    assert "Past 4,608 tokens (6 × the width), scores and mix" in said
    assert "if only pairs that the mask shows are counted, past 9,215 tokens (12 × the width)" in said
    assert "counted, past" not in repr(estimate("bert-base"))
    assert "sliding_window=5 are counted, they never do" in repr(estimate(preset("gpt2", sliding_window=5), mode="train"))


@given(st.integers(1, 61))
def test_decoding_one_row_at_16_bits_does_one_flop_a_byte_whatever_n(n):
    config = GPTConfig(
        vocab_size=23, context_length=61, d_model=12, n_heads=3, n_layers=2, attention_bias=False,
        feed_forward_bias=False,
    )  # fmt: skip
    made = operations(config, Workload(batch=1, length=n, mode="decode", dtype="bfloat16"))
    products = [one for one in made if one.product is not None]
    assert sum(one.flops for one in products) == 2 * sum((one.weights + one.cache) * one.runs for one in products)
    said = estimate(config, length=n, mode="decode", dtype="bfloat16").as_dict()["words"][1]
    d, s = 12, 2
    limit = (12 * d + 2 * n) / (s * n)
    assert said == (
        "In the blocks a decoding step does 1 FLOPs a byte of weights and cache; "
        f"with ever more rows that tends to {limit:.4g}."
    )


def test_more_rows_tend_to_what_is_said():
    rows = estimate(preset("gpt2"), batch=10**9, length=500, mode="decode", dtype="bfloat16").operations
    products = [one for one in rows if one.is_block and one.product is not None]
    moved = 2 * sum((one.weights + one.cache) * one.runs for one in products)
    assert sum(one.flops for one in products) / moved == pytest.approx((12 * 768 + 2 * 500) / (2 * 500), rel=1e-3)


@given(st.integers(1, 40), st.integers(1, 40))
def test_a_recurrence_and_self_attention_cross_at_n_equals_d(n, d):
    """Row 9.5: n²d in one step against nd² in n."""
    found = {one.name: one for one in layers_compared(n, d, batch=3)}
    attention, recurrence = found["self-attention, scores and mix"], found["RNN"]
    assert (attention.flops, recurrence.flops) == (3 * 4 * n * n * d, 3 * 4 * n * d * d)
    assert (attention.flops >= recurrence.flops) == (n >= d)
    assert (attention.sequential_steps, recurrence.sequential_steps) == (1, n)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_the_comparison_s_cells_are_the_model_s(cell):
    config = preset("rnn-nano", cell=cell, attention="none")
    made = operations(config, Workload(batch=2, length=7, source_length=5))
    ours = [one for one in made if one.part == "decoder.recurrence"]
    (row,) = (one for one in layers_compared(7, config.d_model, batch=2) if one.name == cell.upper())
    assert row.flops == sum(one.flops for one in ours)
    assert row.parameters == sum(one.n_parameters for one in ours)
