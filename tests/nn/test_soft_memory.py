"""Is a soft dictionary a dictionary, and soft?"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.choices import AttentionKernel
from qkv.errors import InputError, ShapeError
from qkv.nn import SoftMemory, scaled_dot_product_attention

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
    attended = scaled_dot_product_attention(query[None, None, None], keys[None, None], values[None, None], kernel=AttentionKernel.EAGER)
    torch.testing.assert_close(memory.lookup(query), attended[0, 0, 0])


def test_a_sharp_query_gets_its_own_value():
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


def test_an_empty_memory_has_no_answer():
    with pytest.raises(InputError, match="0 entries, a look-up needs at least 1"):
        SoftMemory().lookup([1.0])


def test_widths_that_differ_are_refused_with_both_numbers():
    memory, _, _ = filled()
    with pytest.raises(ShapeError, match="the key has width 2, the memory's are of width 5"):
        memory[[1.0, 2.0]] = [1.0] * D_VALUE
    with pytest.raises(ShapeError, match="the value has width 2, the memory's are of width 3"):
        memory[[1.0] * WIDTH] = [1.0, 2.0]
    with pytest.raises(ShapeError, match="the query has width 6, the memory's are of width 5"):
        memory.lookup([1.0] * 6)


def test_a_matrix_is_no_key(unchecked):
    with pytest.raises(ShapeError, match=r"one vector, not a tensor of shape \(2, 3\)"):
        SoftMemory()[torch.ones(2, 3)] = [1.0]
    with pytest.raises(ShapeError, match=r"one vector, not a tensor of shape \(0,\)"):
        SoftMemory()[[]] = [1.0]


def test_keys_values_and_queries_may_be_of_any_precision():
    memory = SoftMemory()
    memory[torch.tensor([1.0, 0.0])] = torch.tensor([10.0], dtype=torch.float64)
    memory[torch.tensor([0.0, 1.0])] = torch.tensor([20.0], dtype=torch.float64)
    assert memory.lookup(torch.tensor([0.0, 0.0], dtype=torch.float64)).tolist() == [15.0]
    assert memory.lookup(torch.tensor([0.0, 0.0], dtype=torch.bfloat16)).tolist() == [15.0]
