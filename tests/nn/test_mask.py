"""Does each rule of a mask allow what it says, alone and together?"""

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


def seen(mask: Mask, n_queries: int = 5, n_keys: int = 5) -> list:
    """The table of row 0 as 0 and 1."""
    return mask.to_dense(n_queries, n_keys, CPU).expand(-1, 1, n_queries, n_keys)[0, 0].int().tolist()


def test_no_rule_lets_everything_be_seen():
    assert seen(Mask(), 2, 3) == [[1, 1, 1], [1, 1, 1]]


def test_causal_is_the_lower_triangle_with_its_diagonal():
    assert seen(CAUSAL, 3, 3) == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_a_window_sees_less_than_its_width_on_both_sides():
    assert seen(Mask(sliding_window=2), 4, 4) == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    assert seen(Mask(sliding_window=1), 3, 3) == torch.eye(3).int().tolist()


def test_a_causal_window_is_a_band():
    assert seen(Mask(causal=True, sliding_window=2), 4, 4) == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


def test_padding_is_a_column_nobody_sees():
    mask = Mask(key_padding_mask=IS_TOKEN)
    assert seen(mask, 2, 5) == [[1, 1, 1, 0, 0]] * 2
    assert mask.to_dense(2, 5, CPU)[1, 0, 0].int().tolist() == [0, 1, 1, 1, 1]


def test_packed_documents_are_blocks():
    assert seen(Mask(documents=DOCUMENTS)) == [
        [1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]


def test_queries_that_stand_later_see_all_before_them():
    mask = Mask(causal=True, query_positions=torch.tensor([[3, 4]]))
    assert seen(mask, 2, 6) == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]]
    assert seen(Mask(causal=True, sliding_window=2, query_positions=torch.tensor([[3]])), 1, 5) == [[0, 0, 1, 1, 0]]


def test_keys_may_be_told_where_they_stand():
    mask = Mask(causal=True, key_positions=torch.tensor([[2, 0, 1]]))
    assert not mask.is_causal_only
    expected = [[0, 1, 0], [0, 1, 1], [1, 1, 1]]
    assert seen(mask, 3, 3) == expected
    assert seen(mask.materialize(3, 3, CPU), 3, 3) == expected


@given(st.booleans(), st.none() | st.integers(1, 6), st.booleans(), st.booleans())
def test_rules_together_allow_what_each_of_them_allows(causal, window, padded, packed):
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
    assert torch.equal(mask.materialize(5, 5, CPU).to_dense(5, 5, CPU).expand(2, 1, 5, 5), table)


def test_a_causal_square_is_left_to_the_kernel_and_nothing_else_is():
    assert CAUSAL.materialize(5, 5, CPU).dense is None
    assert Mask(causal=True, sliding_window=2).materialize(5, 5, CPU).dense is not None
    assert Mask(causal=True, key_padding_mask=IS_TOKEN).materialize(5, 5, CPU).dense is not None


@pytest.mark.parametrize("kernel", list(AttentionKernel))
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_row_that_may_see_nothing_gives_zeros_and_finite_gradients(kernel, is_causal):
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
    # What nobody sees gets its gradient from its own query alone, and that looks at nothing here.
    assert not x.grad[1].any()


@pytest.mark.parametrize("kernel", list(AttentionKernel))
def test_what_is_masked_changes_nothing(kernel):
    queries, keys, values = (torch.randn(2, 3, 5, 4) for _ in range(3))
    mask = Mask(key_padding_mask=IS_TOKEN)
    garbage = torch.where(IS_TOKEN[:, None, :, None], 0.0, 1e4)
    expected = scaled_dot_product_attention(queries, keys, values, mask=mask, kernel=kernel)
    got = scaled_dot_product_attention(queries, keys + garbage, values + garbage, mask=mask, kernel=kernel)
    assert torch.equal(got, expected)


def test_a_window_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="window=0 must be at least 1"):
        Mask(sliding_window=0)


def test_masks_of_the_wrong_length_are_refused_with_both_numbers():
    with pytest.raises(ShapeError, match="key_padding_mask covers 5 keys, there are 7"):
        Mask(key_padding_mask=IS_TOKEN).to_dense(3, 7, CPU)
    with pytest.raises(ShapeError, match="documents cover 5 positions, there are 3 queries and 5 keys"):
        Mask(documents=DOCUMENTS).to_dense(3, 5, CPU)
    with pytest.raises(ShapeError, match="over 3 queries and 5 keys needs query_positions"):
        CAUSAL.to_dense(3, 5, CPU)
    with pytest.raises(ShapeError, match="query_positions cover 2 positions, there are 3"):
        Mask(causal=True, query_positions=torch.tensor([[3, 4]])).to_dense(3, 5, CPU)
    with pytest.raises(ShapeError, match="key_positions cover 2 positions, there are 5"):
        Mask(sliding_window=1, key_positions=torch.tensor([[3, 4]])).to_dense(3, 5, CPU)


@pytest.mark.parametrize("name", ["key_padding_mask", "table"])
def test_a_mask_of_numbers_is_refused(name, unchecked):
    """As numbers, 0 and 1 would be added to the scores."""
    given = torch.ones((2, 5) if name == "key_padding_mask" else (1, 1, 3, 5), dtype=torch.long)
    with pytest.raises(InputError, match=f"the mask's {name} is torch.int64, it must be torch.bool"):
        Mask(**{name: given})
