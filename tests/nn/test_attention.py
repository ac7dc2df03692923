"""Tests of attention: formulas, head combinations, taps and rejected inputs."""

import pytest
import torch

from qkv.choices import AttentionKernel, HeadCombination
from qkv.errors import ConfigError, ShapeError
from qkv.inspection.record import select_queries
from qkv.nn import (
    CAUSAL,
    Attention,
    AttentionInputs,
    HeadConfig,
    KVCache,
    Mask,
    scaled_dot_product_attention,
    use_attention_kernel,
)
from qkv.nn.attention import fused_attention, masked_softmax
from qkv.nn.positions import PositionInfo

BATCH, N, N_KEYS, D_MODEL, N_HEADS, D_HEAD, D_VALUE = 2, 7, 5, 13, 3, 4, 11

kernels = pytest.mark.parametrize("kernel", list(AttentionKernel))


def heads(
    combination: HeadCombination = HeadCombination.SPLIT, *, n_heads: int = N_HEADS, n_kv_heads: int = N_HEADS
) -> HeadConfig:
    d_value = D_VALUE if combination is HeadCombination.SPLIT else D_MODEL
    return HeadConfig(n_heads=n_heads, n_kv_heads=n_kv_heads, d_head=D_HEAD, d_value=d_value, combination=combination)


def one_head(attention: Attention, x: torch.Tensor, head: int) -> torch.Tensor:
    """Returns softmax(QKᵀ/√d)V of one head of the first sequence, with shape (position, d_value)."""
    shape = attention.head_config
    kv = head // (shape.n_heads // shape.n_kv_heads)

    def project(linear: torch.nn.Linear, i: int, width: int) -> torch.Tensor:
        rows = slice(i * width, (i + 1) * width)
        return x[0] @ linear.weight[rows].T + linear.bias[rows]

    q = project(attention.q_proj, head, shape.d_head)
    k = project(attention.k_proj, kv, shape.d_head)
    v = project(attention.v_proj, kv, shape.d_value)
    return torch.softmax(q @ k.T / shape.d_head**0.5, dim=-1) @ v


@kernels
def test_one_matmul_for_all_heads_equals_a_loop_over_the_heads(kernel):
    attention, x = Attention(D_MODEL, heads()), torch.randn(1, N, D_MODEL)
    with use_attention_kernel(attention, kernel):
        one_product = attention(x)[0]
    looped = torch.stack([one_head(attention, x, head) for head in range(N_HEADS)])
    queries, keys, values = (
        torch.stack(linear(x)[0].split(width, dim=-1))[None]
        for linear, width in ((attention.q_proj, D_HEAD), (attention.k_proj, D_HEAD), (attention.v_proj, D_VALUE))
    )
    batched = scaled_dot_product_attention(queries, keys, values, kernel=kernel)[0]
    torch.testing.assert_close(batched, looped)
    torch.testing.assert_close(one_product, attention.out_proj(looped.transpose(0, 1).flatten(1)))


@kernels
@pytest.mark.parametrize("combination", list(HeadCombination))
def test_each_head_combination_works_as_documented(combination, kernel):
    attention, x = Attention(D_MODEL, heads(combination)), torch.randn(1, N, D_MODEL)
    results = [one_head(attention, x, head) for head in range(N_HEADS)]
    joined = {
        HeadCombination.SPLIT: torch.cat(results, dim=-1),
        HeadCombination.POOLED: sum(results),
        HeadCombination.POOLED_MEAN: sum(results) / N_HEADS,
    }[combination]
    with use_attention_kernel(attention, kernel):
        torch.testing.assert_close(attention(x)[0], attention.out_proj(joined))


@pytest.mark.parametrize(("h", "d"), [(2, 6), (3, 12)])
def test_a_layer_has_as_many_weights_as_the_lecture_counts(h, d):
    """Split: 4d². Pooled: (2 + h)d², and d² more with W_O. Free value width d_v: 2d² + 2hd·d_v."""

    def count(combination: HeadCombination, d_value: int, *, output_projection: bool = True) -> int:
        shape = HeadConfig(n_heads=h, n_kv_heads=h, d_head=d // h, d_value=d_value, combination=combination)
        attention = Attention(d, shape, bias=False, output_projection=output_projection)
        return sum(parameter.numel() for parameter in attention.parameters())

    assert count(HeadCombination.SPLIT, d // h) == 4 * d**2
    assert count(HeadCombination.POOLED, d, output_projection=False) == (2 + h) * d**2
    assert count(HeadCombination.POOLED, d) == (3 + h) * d**2
    assert count(HeadCombination.SPLIT, 5) == 2 * d**2 + 2 * h * d * 5


@kernels
def test_consecutive_query_heads_share_a_key_value_head(kernel):
    attention, x = Attention(D_MODEL, heads(n_heads=6, n_kv_heads=2)), torch.randn(1, N, D_MODEL)
    expected = torch.cat([one_head(attention, x, head) for head in range(6)], dim=-1)
    with use_attention_kernel(attention, kernel):
        torch.testing.assert_close(attention(x)[0], attention.out_proj(expected))


@kernels
def test_cross_attention_attends_only_to_the_source(kernel):
    attention = Attention(D_MODEL, heads())
    x, source = torch.randn(BATCH, N, D_MODEL), torch.randn(BATCH, N_KEYS, D_MODEL)
    with use_attention_kernel(attention, kernel):
        got = attention(x, source=source)
        # The output of a query depends only on the query and the source, not on other queries.
        alone = attention(x[:, 3:4], source=source)
    torch.testing.assert_close(got[:, 3:4], alone)


@kernels
def test_rows_that_share_a_source_equal_rows_with_repeated_sources(kernel):
    attention = Attention(D_MODEL, heads())
    x, source = torch.randn(6, N, D_MODEL), torch.randn(2, N_KEYS, D_MODEL)
    attention_mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]).bool()
    with use_attention_kernel(attention, kernel):
        shared = attention(x, source=source, mask=Mask(key_padding_mask=attention_mask))
        copied = attention(
            x, source=source.repeat_interleave(3, 0), mask=Mask(key_padding_mask=attention_mask.repeat_interleave(3, 0))
        )
    torch.testing.assert_close(shared, copied)


def test_the_scores_are_divided_by_the_root_of_the_head_width():
    queries, keys = torch.randn(1, 1, N, D_HEAD), torch.randn(1, 1, N_KEYS, D_HEAD)
    lookup = AttentionInputs(queries=queries, keys=keys, values=keys, scale=D_HEAD**-0.5)
    expected = torch.einsum("nd,md->nm", queries[0, 0], keys[0, 0]) / 2.0
    torch.testing.assert_close(lookup.scores()[0, 0], expected)
    assert Attention(D_MODEL, heads()).scale == 0.5
    assert Attention(D_MODEL, heads(), scale_scores=False).scale == 1.0


@kernels
def test_a_bias_is_added_to_the_scores_before_the_softmax(kernel):
    attention, x = Attention(D_MODEL, heads()), torch.randn(1, N, D_MODEL)
    # The bias is so large that each head attends only to key `head + 1`.
    bias = torch.zeros(1, N_HEADS, N, N)
    for head in range(N_HEADS):
        bias[:, head, :, head + 1] = 1e4
    values = attention.v_proj(x)[0].view(N, N_HEADS, D_VALUE)
    picked = torch.cat([values[head + 1, head] for head in range(N_HEADS)])
    with use_attention_kernel(attention, kernel):
        got = attention(x, position_info=PositionInfo(bias=bias))
    torch.testing.assert_close(got[0], attention.out_proj(picked).expand(N, -1))


@kernels
def test_a_bias_and_a_causal_mask_work_together(kernel):
    queries, keys, values = (torch.randn(BATCH, N_HEADS, N, D_HEAD) for _ in range(3))
    bias = torch.randn(1, N_HEADS, N, N)
    lookup = AttentionInputs(queries=queries, keys=keys, values=values, scale=0.5, mask=CAUSAL, bias=bias)
    scores = queries @ keys.mT * 0.5 + bias + torch.full((N, N), float("-inf")).triu(1)
    expected = scores.softmax(-1) @ values
    got = fused_attention(lookup) if kernel is AttentionKernel.FUSED else lookup.weighted_values(lookup.weights())
    torch.testing.assert_close(got, expected)


def test_selected_queries_give_the_same_rows_as_all_queries():
    queries, keys = torch.randn(BATCH, N_HEADS, N, D_HEAD), torch.randn(BATCH, N_HEADS, N, D_HEAD)
    bias = torch.randn(1, N_HEADS, N, N)
    lookup = AttentionInputs(queries=queries, keys=keys, values=keys, scale=0.5, mask=CAUSAL, bias=bias)
    rows = torch.tensor([4, 1])
    torch.testing.assert_close(select_queries(lookup, rows).weights(), lookup.weights()[:, :, rows])


def test_weights_are_a_softmax_and_zero_in_fully_masked_rows():
    scores = torch.tensor([[[[0.0, 0.0], [float("-inf"), 1.0], [float("-inf")] * 2]]])
    assert masked_softmax(scores).tolist() == [[[[0.5, 0.5], [0.0, 1.0], [0.0, 0.0]]]]
    scores.requires_grad_()
    masked_softmax(scores).square().sum().backward()
    assert bool(scores.grad.isfinite().all())


@kernels
@pytest.mark.parametrize("n_first", [1, 4, 6])
def test_a_cached_step_equals_the_same_rows_of_the_full_pass(n_first, kernel):
    attention, x = Attention(6, HeadConfig.split(6, 3)).eval(), torch.randn(BATCH, N, 6)
    full_output = attention(x, mask=CAUSAL)
    cache = KVCache(n_layers=1, batch=BATCH, capacity=N, key_shape=(3, 2), value_shape=(3, 2), like=x)
    with use_attention_kernel(attention, kernel), torch.no_grad():
        for rows in (slice(0, n_first), slice(n_first, N)):
            positions = cache.reserve(batch=BATCH, n_new=rows.stop - rows.start)
            step = attention(x[:, rows], mask=Mask(causal=True, query_positions=positions), cache=cache.layers[0])
            torch.testing.assert_close(step, full_output[:, rows])


def test_dropout_is_only_active_in_training():
    attention, x = Attention(D_MODEL, heads(), dropout=0.9), torch.randn(BATCH, N, D_MODEL)
    for kernel in AttentionKernel:
        with use_attention_kernel(attention, kernel):
            attention.eval()
            quiet = attention(x)
            assert torch.equal(attention(x), quiet)
            attention.train()
            assert not torch.allclose(attention(x), quiet)


def test_the_kernel_is_restored_after_the_context_even_after_an_error():
    attention = Attention(D_MODEL, heads())
    with pytest.raises(ShapeError), use_attention_kernel(attention, AttentionKernel.EAGER):  # noqa: PT012
        assert attention.kernel is AttentionKernel.EAGER
        attention(torch.randn(1, 0, D_MODEL))
    assert attention.kernel is AttentionKernel.FUSED


def test_without_an_output_projection_the_heads_must_be_as_wide_as_the_model():
    with pytest.raises(ConfigError, match=r"d_model=13\b.*\b33\b"):
        Attention(D_MODEL, heads(), output_projection=False)
    pooled = Attention(D_MODEL, heads(HeadCombination.POOLED), output_projection=False)
    assert pooled(torch.randn(BATCH, N, D_MODEL)).shape == (BATCH, N, D_MODEL)


def test_impossible_head_configs_are_rejected():
    with pytest.raises(ConfigError, match=r"d_model=13\b.*n_heads=3"):
        HeadConfig.split(13, 3)
    with pytest.raises(ConfigError, match=r"d_model=13\b.*n_heads=0"):
        HeadConfig.split(13, 0)
    with pytest.raises(ConfigError, match=r"n_heads=3\b.*n_kv_heads=2"):
        heads(n_kv_heads=2)
    with pytest.raises(ConfigError, match=r"n_heads=3\b.*n_kv_heads=6"):
        heads(n_kv_heads=6)
    with pytest.raises(ConfigError, match=r"d_head .*\b1, got 0$"):
        HeadConfig(n_heads=1, n_kv_heads=1, d_head=0, d_value=1)


def test_inputs_of_the_wrong_shape_are_rejected(unchecked):
    attention, x = Attention(D_MODEL, heads()), torch.randn(BATCH, N, D_MODEL)
    with pytest.raises(ShapeError, match=r"x\b.*\b12\b.*d_model=13"):
        attention(x[..., :12])
    with pytest.raises(ShapeError, match=r"source\b.*\b12\b.*d_model=13"):
        attention(x, source=x[..., :12])
    with pytest.raises(ShapeError, match=r"x\b.*\b0\b.*\b1\b"):
        attention(x[:, :0])
    with pytest.raises(ShapeError, match=r"source\b.*\b0\b.*\b1\b"):
        attention(x, source=x[:, :0])
    with pytest.raises(ShapeError, match=r"\b3\b.*\b2\b"):
        attention(torch.randn(3, N, D_MODEL), source=x)


def test_dot_product_attention_rejects_mismatched_shapes(unchecked):
    q, k = torch.randn(1, 1, N, 4), torch.randn(1, 1, N_KEYS, 3)
    with pytest.raises(ShapeError, match=r"\b4\b.*\b3\b"):
        scaled_dot_product_attention(q, k, k)
    with pytest.raises(ShapeError, match=r"\b5\b.*\b7\b"):
        scaled_dot_product_attention(k, k, q)


@kernels
def test_a_mask_of_the_wrong_shape_is_rejected(kernel, unchecked):
    attention, x = Attention(D_MODEL, heads()), torch.randn(BATCH, N, D_MODEL)
    with use_attention_kernel(attention, kernel):
        with pytest.raises(ShapeError, match=r"key_padding_mask\b.*\b5\b.*\b7\b"):
            attention(x, mask=Mask(key_padding_mask=torch.ones(BATCH, 5, dtype=torch.bool)))
        with pytest.raises(ShapeError, match=r"key_padding_mask\b.*\b3\b.*\b2\b"):
            attention(x, mask=Mask(key_padding_mask=torch.ones(3, N, dtype=torch.bool)))
        with pytest.raises(ShapeError, match=r"documents\b.*\b3\b.*\b2\b"):
            attention(x, mask=Mask(documents=torch.ones(3, N, dtype=torch.long)))
        with pytest.raises(ShapeError, match=r"\(1, 1, 6, 6\).* \(2, 3, 7, 7\)"):
            attention(x, mask=Mask(dense=torch.ones(1, 1, 6, 6, dtype=torch.bool)))
        with pytest.raises(ShapeError, match=r"\(3, 1, 1, 7\).* \(2, 3, 7, 7\)"):
            attention(x, mask=Mask(dense=torch.ones(3, 1, 1, N, dtype=torch.bool)))
        with pytest.raises(ShapeError, match=r"\(1, 1, 1, 1\).* \(2, 3, 7, 7\)"):
            attention(x, mask=Mask(dense=torch.ones(1, 1, 1, 1, dtype=torch.bool)))


@pytest.mark.parametrize("kernel", list(AttentionKernel))
def test_heads_and_rows_that_do_not_fit_are_rejected(kernel, unchecked):
    queries = torch.randn(2, 3, 5, 7)
    for rows, n_heads in ((2, 2), (2, 6), (1, 3)):
        keys = torch.randn(rows, n_heads, 11, 7)
        with pytest.raises(ShapeError, match=rf"\b2\b.*\b3\b.*\b{rows}\b.*\b{n_heads}\b"):
            scaled_dot_product_attention(queries, keys, keys, kernel=kernel)
