"""Tests of the soft dictionary."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.choices import AttentionKernel
from qkv.errors import InputError, ShapeError
from qkv.lessons.soft_dictionary import SoftMemory
from qkv.nn import scaled_dot_product_attention

WIDTH, D_VALUE, N_ENTRIES = 5, 3, 7


def filled(*, scaled: bool = True) -> tuple[SoftMemory, torch.Tensor, torch.Tensor]:
    memory = SoftMemory(scaled=scaled)
    keys, values = torch.randn(N_ENTRIES, WIDTH), torch.randn(N_ENTRIES, D_VALUE)
    for key, value in zip(keys, values, strict=True):
        memory[key] = value
    return memory, keys, values


@pytest.mark.parametrize("scaled", [False, True])
def test_the_answer_is_the_softmax_weighted_sum_of_the_values(scaled):
    memory, keys, values = filled(scaled=scaled)
    query = torch.randn(WIDTH)
    scores = torch.tensor([float(key @ query) / (WIDTH**0.5 if scaled else 1.0) for key in keys])
    weights = scores.exp() / scores.exp().sum()
    torch.testing.assert_close(memory.weights(query), weights)
    torch.testing.assert_close(memory.lookup(query), sum(w * v for w, v in zip(weights, values, strict=True)))


def test_a_memory_is_attention_with_one_query():
    memory, keys, values = filled()
    query = torch.randn(WIDTH)
    attended = scaled_dot_product_attention(
        query[None, None, None], keys[None, None], values[None, None], kernel=AttentionKernel.EAGER
    )
    torch.testing.assert_close(memory.lookup(query), attended[0, 0, 0])


def test_a_large_query_returns_the_value_of_its_key():
    memory = SoftMemory()
    for i in range(4):
        memory[torch.eye(4)[i]] = [float(i)]
    torch.testing.assert_close(memory.lookup(torch.eye(4)[2] * 100), torch.tensor([2.0]))


@given(st.lists(st.floats(-3, 3, width=32), min_size=WIDTH, max_size=WIDTH))
def test_the_weights_are_positive_and_sum_to_one(query):
    weights = filled()[0].weights(query)
    assert bool((weights > 0).all())
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0))


def test_an_equal_key_is_replaced():
    memory = SoftMemory()
    memory[[1.0, 0.0]] = [10.0]
    memory[[0.0, 1.0]] = [20.0]
    memory[[1.0, 0.0]] = [30.0]
    assert len(memory) == 2
    torch.testing.assert_close(memory.lookup([0.0, 0.0]), torch.tensor([25.0]))


def test_a_lookup_in_an_empty_memory_is_rejected():
    with pytest.raises(InputError, match="0 entries"):
        SoftMemory().lookup([1.0])


def test_widths_that_differ_are_rejected():
    memory, _, _ = filled()
    with pytest.raises(ShapeError, match=r"key\b.*\b2\b.*\b5\b"):
        memory[[1.0, 2.0]] = [1.0] * D_VALUE
    with pytest.raises(ShapeError, match=r"value\b.*\b2\b.*\b3\b"):
        memory[[1.0] * WIDTH] = [1.0, 2.0]
    with pytest.raises(ShapeError, match=r"query\b.*\b6\b.*\b5\b"):
        memory.lookup([1.0] * 6)


def test_a_matrix_as_key_is_rejected(unchecked):
    with pytest.raises(ShapeError, match=r"\(2, 3\)"):
        SoftMemory()[torch.ones(2, 3)] = [1.0]
    with pytest.raises(ShapeError, match=r"\(0,\)"):
        SoftMemory()[[]] = [1.0]


def test_keys_values_and_queries_may_be_of_any_precision():
    memory = SoftMemory()
    memory[torch.tensor([1.0, 0.0])] = torch.tensor([10.0], dtype=torch.float64)
    memory[torch.tensor([0.0, 1.0])] = torch.tensor([20.0], dtype=torch.float64)
    assert memory.lookup(torch.tensor([0.0, 0.0], dtype=torch.float64)).tolist() == [15.0]
    assert memory.lookup(torch.tensor([0.0, 0.0], dtype=torch.bfloat16)).tolist() == [15.0]
