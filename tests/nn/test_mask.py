"""Tests of mask rules, separately and combined."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.choices import AttentionKernel
from qkv.errors import ConfigError, InputError, ShapeError
from qkv.nn import CAUSAL, Attention, HeadConfig, Mask, scaled_dot_product_attention, use_attention_kernel

CPU = torch.device("cpu")
IS_TOKEN = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]]).bool()
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 2], [0, 1, 1, 1, 1]])


def dense_rows(mask: Mask, n_queries: int = 5, n_keys: int = 5) -> list:
    """Returns the dense mask of row 0 as 0s and 1s."""
    return mask.to_dense(n_queries, n_keys, CPU).expand(-1, 1, n_queries, n_keys)[0, 0].int().tolist()


def test_an_empty_mask_makes_every_key_visible():
    assert dense_rows(Mask(), 2, 3) == [[1, 1, 1], [1, 1, 1]]


def test_causal_is_the_lower_triangle_with_its_diagonal():
    assert dense_rows(CAUSAL, 3, 3) == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_a_sliding_window_limits_both_directions():
    assert dense_rows(Mask(sliding_window=2), 4, 4) == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    assert dense_rows(Mask(sliding_window=1), 3, 3) == torch.eye(3).int().tolist()


def test_a_causal_window_is_a_band():
    assert dense_rows(Mask(causal=True, sliding_window=2), 4, 4) == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1],
    ]


def test_padding_keys_are_never_visible():
    mask = Mask(key_padding_mask=IS_TOKEN)
    assert dense_rows(mask, 2, 5) == [[1, 1, 1, 0, 0]] * 2
    assert mask.to_dense(2, 5, CPU)[1, 0, 0].int().tolist() == [0, 1, 1, 1, 1]


def test_packed_documents_are_blocks():
    assert dense_rows(Mask(documents=DOCUMENTS)) == [
        [1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]


def test_query_positions_shift_the_causal_mask():
    mask = Mask(causal=True, query_positions=torch.tensor([[3, 4]]))
    assert dense_rows(mask, 2, 6) == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]]
    assert dense_rows(Mask(causal=True, sliding_window=2, query_positions=torch.tensor([[3]])), 1, 5) == [
        [0, 0, 1, 1, 0]
    ]


def test_key_positions_shift_the_mask():
    mask = Mask(causal=True, key_positions=torch.tensor([[2, 0, 1]]))
    assert not mask.is_causal_only
    expected = [[0, 1, 0], [0, 1, 1], [1, 1, 1]]
    assert dense_rows(mask, 3, 3) == expected
    assert dense_rows(mask.materialize_if_kernel_needs_it(3, 3, CPU), 3, 3) == expected


@given(st.booleans(), st.none() | st.integers(1, 6), st.booleans(), st.booleans())
def test_combined_rules_allow_only_what_every_rule_allows(causal, window, padded, packed):
    mask = Mask(
        causal=causal,
        sliding_window=window,
        key_padding_mask=IS_TOKEN if padded else None,
        documents=DOCUMENTS if packed else None,
    )
    table = mask.to_dense(5, 5, CPU).expand(2, 1, 5, 5)
    for b, q, k in product(range(2), range(5), range(5)):
        allowed = (
            (not causal or k <= q)
            and (window is None or abs(q - k) < window)
            and (not padded or bool(IS_TOKEN[b, k]))
            and (not packed or bool(DOCUMENTS[b, q] == DOCUMENTS[b, k]))
        )
        assert bool(table[b, 0, q, k]) == allowed
    assert torch.equal(mask.materialize_if_kernel_needs_it(5, 5, CPU).to_dense(5, 5, CPU).expand(2, 1, 5, 5), table)


def test_only_a_square_causal_mask_is_not_materialized():
    assert CAUSAL.materialize_if_kernel_needs_it(5, 5, CPU).dense is None
    assert Mask(causal=True, sliding_window=2).materialize_if_kernel_needs_it(5, 5, CPU).dense is not None
    assert Mask(causal=True, key_padding_mask=IS_TOKEN).materialize_if_kernel_needs_it(5, 5, CPU).dense is not None


@pytest.mark.parametrize("kernel", list(AttentionKernel))
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_fully_masked_row_gives_zeros_and_finite_gradients(kernel, is_causal):
    attention = Attention(6, HeadConfig.split(6, 2))
    x = torch.randn(2, 5, 6, requires_grad=True)
    attention_mask = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()
    results = []
    end = attention.head_outputs.observe(results.append)
    with use_attention_kernel(attention, kernel):
        attention(x, mask=Mask(causal=is_causal, key_padding_mask=attention_mask)).square().sum().backward()
    end()
    assert not results[0][1].any()
    if is_causal:
        assert not results[0][0, :, :2].any()
    assert bool(results[0][0, :, 2:].all())
    for tensor in (x, *attention.parameters()):
        assert bool(tensor.grad.isfinite().all())
    # A masked position gets a gradient only through its own query, which is fully masked here.
    assert not x.grad[1].any()


@pytest.mark.parametrize("kernel", list(AttentionKernel))
def test_masked_keys_do_not_change_the_output(kernel):
    queries, keys, values = (torch.randn(2, 3, 5, 4) for _ in range(3))
    mask = Mask(key_padding_mask=IS_TOKEN)
    garbage = torch.where(IS_TOKEN[:, None, :, None], 0.0, 1e4)
    expected = scaled_dot_product_attention(queries, keys, values, mask=mask, kernel=kernel)
    got = scaled_dot_product_attention(queries, keys + garbage, values + garbage, mask=mask, kernel=kernel)
    assert torch.equal(got, expected)


def test_a_sliding_window_of_zero_is_rejected():
    with pytest.raises(ConfigError, match=r"sliding_window .*\b1, got 0$"):
        Mask(sliding_window=0)


def test_masks_of_the_wrong_length_are_rejected():
    with pytest.raises(ShapeError, match=r"key_padding_mask\b.*\b5\b.*\b7\b"):
        Mask(key_padding_mask=IS_TOKEN).to_dense(3, 7, CPU)
    with pytest.raises(ShapeError, match=r"documents\b.*\b5\b.*\b3\b"):
        Mask(documents=DOCUMENTS).to_dense(3, 5, CPU)
    with pytest.raises(ShapeError, match=r"\b3\b.*\b5\b.*query_positions"):
        CAUSAL.to_dense(3, 5, CPU)
    with pytest.raises(ShapeError, match=r"query_positions\b.*\b2\b.*\b3\b"):
        Mask(causal=True, query_positions=torch.tensor([[3, 4]])).to_dense(3, 5, CPU)
    with pytest.raises(ShapeError, match=r"key_positions\b.*\b2\b.*\b5\b"):
        Mask(sliding_window=1, key_positions=torch.tensor([[3, 4]])).to_dense(3, 5, CPU)


@pytest.mark.parametrize("name", ["key_padding_mask", "dense"])
def test_a_non_boolean_mask_is_rejected(name, unchecked):
    """A mask of 0s and 1s would be added to the scores."""
    integer_mask = torch.ones((2, 5) if name == "key_padding_mask" else (1, 1, 3, 5), dtype=torch.long)
    with pytest.raises(InputError, match=rf"{name}\b.*torch\.int64"):
        Mask(**{name: integer_mask})
