"""Grouped-query attention equals full attention with repeated key/value heads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.choices import HeadCombination
from qkv.nn import CAUSAL, Attention, HeadConfig
from tests.agreement.model_strategies import (
    assert_close,
    build_random_model,
    gpts,
    random_ids,
    randomize_parameters,
    seeds,
)

N_HEADS, N_KV_HEADS = 6, 2


def repeat_kv_heads(weight, n_kv_heads):
    """Returns the rows of each key/value head, repeated for every query head of its group."""
    heads = weight.unflatten(0, (n_kv_heads, -1))
    return heads.repeat_interleave(N_HEADS // n_kv_heads, dim=0).flatten(0, 1)


@given(gpts(n_kv_heads=N_KV_HEADS), seeds)
def test_a_grouped_gpt_equals_one_with_its_key_and_value_weights_repeated(config, seed):
    grouped = build_random_model(config, seed)
    full = build_random_model(config.replace(n_kv_heads=N_HEADS), seed)
    state = grouped.state_dict()
    for name, tensor in state.items():
        if ".k_proj." in name or ".v_proj." in name:
            state[name] = repeat_kv_heads(tensor, N_KV_HEADS)
    full.load_state_dict(state)
    ids = random_ids(seed, 3, 7)
    assert_close(grouped(ids), full(ids))


@pytest.mark.parametrize("combination", HeadCombination)
def test_attention_equals_a_computation_head_by_head(combination):
    d_model, d_head = 11, 4
    d_value = 5 if combination is HeadCombination.SPLIT else d_model
    heads = HeadConfig(n_heads=N_HEADS, n_kv_heads=N_HEADS, d_head=d_head, d_value=d_value, combination=combination)
    attention = Attention(d_model, heads).double()
    randomize_parameters(attention, 3)
    x = torch.randn(3, 7, d_model, dtype=torch.float64)

    def part(linear, head, width):
        rows = slice(head * width, (head + 1) * width)
        return x @ linear.weight[rows].T + linear.bias[rows]

    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    results = []
    for head in range(N_HEADS):
        scores = part(attention.q_proj, head, d_head) @ part(attention.k_proj, head, d_head).mT / d_head**0.5
        results.append(scores.masked_fill(future, float("-inf")).softmax(-1) @ part(attention.v_proj, head, d_value))
    joined = {
        HeadCombination.SPLIT: torch.cat(results, dim=-1),
        HeadCombination.POOLED: sum(results),
        HeadCombination.POOLED_MEAN: sum(results) / N_HEADS,
    }[combination]
    assert_close(attention(x, mask=CAUSAL), joined @ attention.out_proj.weight.T + attention.out_proj.bias)


@given(st.sampled_from((1, 2, 3, 6)), seeds)
def test_each_key_value_head_serves_consecutive_query_heads(n_kv_heads, seed):
    """Zeroing the values of a key/value head zeroes the outputs of its group of query heads and no others."""
    heads = HeadConfig(n_heads=N_HEADS, n_kv_heads=n_kv_heads, d_head=4, d_value=4)
    attention = Attention(11, heads, bias=False).double()
    randomize_parameters(attention, seed)
    with torch.no_grad():
        attention.v_proj.weight.unflatten(0, (n_kv_heads, -1))[0] = 0.0
    results = []
    attention.head_outputs.observe(results.append)
    attention(torch.randn(3, 7, 11, dtype=torch.float64))
    is_silent = (results[0] == 0).all(-1).all(-1).all(0)
    group = N_HEADS // n_kv_heads
    assert is_silent.tolist() == [head < group for head in range(N_HEADS)]
