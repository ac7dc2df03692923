"""Explanations of costs are numerically exact."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.config import GPTConfig, preset
from qkv.cost import Workload, attention_crossover, compare_attention_with_rnn_costs, estimate, list_operations
from tests.cost.config_strategies import gpt


def block_flops(config, n, field):
    """FLOPs of scores and mix, and of the rest of a block."""
    block = [op for op in list_operations(config, Workload(batch_size=1, seq_len=n)) if op.is_block]
    attention_core = sum(getattr(op, field) for op in block if op.is_attention_core)
    return attention_core, sum(op.flops for op in block if not op.is_attention_core)


@settings(max_examples=40)
@given(gpt)
def test_the_crossover_is_the_first_length_at_which_attention_costs_as_much_as_the_rest(config):
    config = config.replace(context_length=10**9)
    result = attention_crossover(config)
    for n, field in ((result.executed, "flops"), (result.useful, "useful_flops")):
        if n is None:
            attention_core, rest = block_flops(config, 10**6, field)
            assert attention_core < rest
            continue
        attention_core, rest = block_flops(config, n, field)
        assert attention_core >= rest
        if n > 1:
            attention_core, rest = block_flops(config, n - 1, field)
            assert attention_core < rest


def test_attention_costs_as_much_as_the_rest_at_6d_executed_and_12d_useful():
    assert (attention_crossover(preset("gpt2")).executed, attention_crossover(preset("gpt2")).useful) == (
        6 * 768,
        12 * 768 - 1,
    )
    text = repr(estimate("gpt2", mode="train"))
    assert "4,608 tokens (6 × d_model)" in text
    assert "9,215 tokens (12 × d_model)" in text
    # Without a mask, the two lengths are the same, and only one is printed.
    assert repr(estimate("bert-base")).count("× d_model") == 1
    assert "sliding_window=5" in repr(estimate(preset("gpt2", sliding_window=5), mode="train"))


@given(st.integers(1, 61))
def test_decoding_one_sequence_in_16_bits_has_one_flop_per_byte_for_every_n(n):
    config = GPTConfig(
        vocab_size=23,
        context_length=61,
        d_model=12,
        n_heads=3,
        n_layers=2,
        attention_bias=False,
        feed_forward_bias=False,
    )
    operations = list_operations(config, Workload(batch_size=1, seq_len=n, mode="decode", dtype="bfloat16"))
    matmuls = [op for op in operations if op.matmul is not None]
    assert sum(op.flops for op in matmuls) == 2 * sum((op.weights + op.cache) * op.runs for op in matmuls)
    explanation = estimate(config, seq_len=n, mode="decode", dtype="bfloat16").as_dict()["explanation"][1]
    d, s = 12, 2
    limit = (12 * d + 2 * n) / (s * n)
    assert re.findall(r"\d[\d.]*(?=[ .])", explanation) == ["1", f"{limit:.4g}"]


def test_a_large_batch_tends_to_the_limit_of_the_intensity():
    rows = estimate(preset("gpt2"), batch_size=10**9, seq_len=500, mode="decode", dtype="bfloat16").operations
    matmuls = [op for op in rows if op.is_block and op.matmul is not None]
    moved = 2 * sum((op.weights + op.cache) * op.runs for op in matmuls)
    assert sum(op.flops for op in matmuls) / moved == pytest.approx((12 * 768 + 2 * 500) / (2 * 500), rel=1e-3)


@given(st.integers(1, 40), st.integers(1, 40))
def test_an_rnn_and_self_attention_cost_the_same_at_n_equals_d(n, d):
    """n²d in one step versus nd² in n steps."""
    result = {op.name: op for op in compare_attention_with_rnn_costs(n, d, batch_size=3)}
    attention, recurrence = result["self-attention, scores and mix"], result["RNN"]
    assert (attention.flops, recurrence.flops) == (3 * 4 * n * n * d, 3 * 4 * n * d * d)
    assert (attention.flops >= recurrence.flops) == (n >= d)
    assert (attention.sequential_steps, recurrence.sequential_steps) == (1, n)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_the_compared_rnn_cells_equal_those_of_the_model(cell):
    config = preset("rnn-nano", cell=cell, attention="none")
    operations = list_operations(config, Workload(batch_size=2, seq_len=7, source_len=5))
    recurrence = [op for op in operations if op.part == "decoder.recurrence"]
    (row,) = (op for op in compare_attention_with_rnn_costs(7, config.d_model, batch_size=2) if op.name == cell.upper())
    assert row.flops == sum(op.flops for op in recurrence)
    assert row.parameters == sum(op.n_parameters for op in recurrence)
