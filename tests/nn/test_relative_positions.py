"""Tests of rotary embeddings, ALiBi and T5's relative bias."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.errors import ConfigError
from qkv.nn.positions import ALiBi, PositionInfo, RelativeBias, RopeScalingRule, RotaryEmbedding, alibi_slopes

D_HEAD, N_HEADS = 6, 3


def rotate_at(vector: torch.Tensor, position: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    at = torch.tensor([[position]])
    return RotaryEmbedding(D_HEAD)(at, at, dtype).rotate(vector[None, None, None])[0, 0, 0]


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 3000))
def test_rotary_scores_depend_only_on_the_distance(query_at, key_at, shift):
    query, key = torch.randn(2, D_HEAD, dtype=torch.float64)
    here = rotate_at(query, query_at) @ rotate_at(key, key_at)
    there = rotate_at(query, query_at + shift) @ rotate_at(key, key_at + shift)
    torch.testing.assert_close(here, there)


def test_rotary_rotates_dimension_i_with_dimension_i_plus_half():
    vector = torch.zeros(D_HEAD, dtype=torch.float64)
    vector[1] = 1.0
    angle = 5 * 10000 ** (-2 / D_HEAD)
    expected = torch.zeros(D_HEAD, dtype=torch.float64)
    expected[1], expected[4] = math.cos(angle), math.sin(angle)
    torch.testing.assert_close(rotate_at(vector, 5), expected)


def test_rotary_angles_of_a_float64_model_are_float64():
    at = torch.tensor([[100_003]])
    cos, _ = RotaryEmbedding(D_HEAD)(at, at, torch.float64).rotation
    expected = [math.cos(100_003 * 10000 ** (-2 * i / D_HEAD)) for i in range(D_HEAD // 2)]
    assert cos[0, 0, 0].tolist() == pytest.approx(expected * 2, abs=1e-9)


def test_rotary_leaves_lengths_and_position_0_as_they_are():
    vector = torch.randn(D_HEAD, dtype=torch.float64)
    torch.testing.assert_close(rotate_at(vector, 777).norm(), vector.norm())
    assert torch.equal(rotate_at(vector, 0), vector)


def test_rotary_rotates_more_slowly_with_a_larger_theta():
    at = torch.tensor([[1]])
    cos, sin = RotaryEmbedding(4, theta=100.0)(at, at, torch.float64).rotation
    expected = torch.tensor([1.0, 0.1, 1.0, 0.1], dtype=torch.float64)
    torch.testing.assert_close(torch.atan2(sin, cos)[0, 0, 0], expected)


def test_rotary_angles_are_not_rounded_with_the_weights():
    at = torch.tensor([[1001]])
    exact = RotaryEmbedding(D_HEAD)(at, at, torch.float64).rotation[0]
    rotary = RotaryEmbedding(D_HEAD).bfloat16()
    torch.testing.assert_close(rotary(at, at, torch.bfloat16).rotation[0].double(), exact, rtol=0, atol=1e-4)


def test_linear_scaling_divides_all_frequencies():
    torch.testing.assert_close(RopeScalingRule(factor=4.0)(torch.tensor([1.0, 0.2])), torch.tensor([0.25, 0.05]))


def test_llama_scaling_keeps_high_frequencies_and_divides_low_ones():
    """In a context of 100, 8 rotations are unchanged, 0.5 are divided, and 2.5 are the midpoint of 1 and 4."""
    frequencies = torch.tensor([8.0, 2.5, 0.5]) * 2 * math.pi / 100
    scaled = RopeScalingRule(factor=8.0, original_context_length=100)(frequencies)
    torch.testing.assert_close(scaled / frequencies, torch.tensor([1.0, (1 + 1 / 8) / 2, 1 / 8]))


def test_without_rotation_rotate_is_the_identity():
    x = torch.randn(2, 3, 5, 4)
    assert torch.equal(PositionInfo().rotate(x), x)


def test_an_odd_head_width_is_rejected():
    with pytest.raises(ConfigError, match="d_head=5"):
        RotaryEmbedding(5)


def test_the_slopes_of_8_heads_halve_from_one_half():
    assert alibi_slopes(8) == [1 / 2**i for i in range(1, 9)]


def test_the_slopes_of_12_heads_are_those_of_8_and_every_second_one_of_16():
    """Checks the published rule for head counts that are not powers of two."""
    expected = [1 / 2**i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    assert alibi_slopes(12) == pytest.approx(expected, rel=1e-15)


@given(st.integers(1, 200))
def test_there_is_a_slope_for_each_head_and_no_two_are_equal(n_heads):
    slopes = alibi_slopes(n_heads)
    assert len(set(slopes)) == n_heads
    assert all(0 < slope < 1 for slope in slopes)


def test_alibi_subtracts_slope_times_distance_from_the_score():
    bias = ALiBi(2)(torch.tensor([[0, 4]]), torch.tensor([[0, 1, 4]])).bias
    assert bias.shape == (1, 2, 2, 3)
    slopes = [2**-4, 2**-8]
    for head, slope in enumerate(slopes):
        assert bias[0, head].tolist() == [[0, -slope, -4 * slope], [-4 * slope, -3 * slope, 0]]


def relative(*, bidirectional: bool, n_buckets: int = 32, max_distance: int = 128) -> RelativeBias:
    return RelativeBias(N_HEADS, n_buckets=n_buckets, max_distance=max_distance, bidirectional=bidirectional)


def test_a_decoders_buckets_are_exact_to_15_then_grow_and_end_at_31():
    """T5 has 32 buckets up to distance 128: 16 for single distances, then 16 that each grow by 8^(1/16)."""
    buckets = relative(bidirectional=False).bucket_indices(-torch.arange(200)).tolist()
    assert buckets[:16] == list(range(16))
    # 16·8^(1/16) = 18.2, 16·8^(2/16) = 20.7, 16·8^(3/16) = 23.6
    assert buckets[16:24] == [16, 16, 16, 17, 17, 18, 18, 18]
    assert buckets == sorted(buckets)
    assert set(buckets) == set(range(32))
    assert set(buckets[113:]) == {31}


def test_a_decoder_assigns_future_keys_to_the_bucket_of_distance_0():
    assert relative(bidirectional=False).bucket_indices(torch.tensor([1, 5, 100])).tolist() == [0, 0, 0]


def test_an_encoder_has_half_of_the_buckets_for_each_side():
    part = relative(bidirectional=True)
    before, after = part.bucket_indices(-torch.arange(1, 200)), part.bucket_indices(torch.arange(1, 200))
    assert torch.equal(after, before + 16)
    assert before[:7].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert int(before.max()) == 15
    assert part.bucket_indices(torch.tensor([0])).tolist() == [0]


@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_bias_of_a_pair_is_the_table_row_of_its_bucket(bidirectional):
    part = relative(bidirectional=bidirectional, n_buckets=8, max_distance=7)
    queries, keys = torch.tensor([[3, 9]]), torch.tensor([[0, 2, 3, 5, 11]])
    bias = part(queries, keys).bias
    assert bias.shape == (1, N_HEADS, 2, 5)
    for q in range(2):
        for k in range(5):
            bucket = int(part.bucket_indices(keys[0, k] - queries[0, q]))
            assert torch.equal(bias[0, :, q, k], part.table.weight[bucket])


@pytest.mark.parametrize("part", [relative(bidirectional=True), ALiBi(N_HEADS)], ids=["learned", "alibi"])
def test_the_bias_is_contiguous_along_the_keys(part):
    at = torch.arange(5)[None]
    assert part(at, at).bias.stride(-1) == 1
