"""A prepared product gives what torch's own gives, at every size and number of rows for which it has another road."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from qkv.choices import Activation
from qkv.generation.prepacked_weights import (
    BLOCK_COLUMNS,
    MIN_PADDED_SIZE,
    MIN_ONEDNN_SIZE,
    MIN_BLOCKED_SIZE,
    PackedInt8Linear,
    PackedLinear,
    PrepackedWeights,
)
from qkv.nn import Int8Linear, activate

SHAPES = {
    "tiny": [(13, 7)],
    "two tiny ones": [(13, 7), (11, 7)],
    "blocks, all full": [(10 * BLOCK_COLUMNS, 107)],
    "blocks, the last not full": [(331, 101)],
    "blocks of two weights": [(331, 101), (53, 101)],
    "oneDNN's": [(331, 401)],
    "far": [(1031, 1021)],
}


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(SHAPES)), st.integers(1, 5), st.booleans())
def test_a_prepared_product_gives_what_linear_gives(name, rows, has_bias):
    chance = torch.Generator().manual_seed(rows)
    weights = [torch.randn(shape, generator=chance) for shape in SHAPES[name]]
    biases = [torch.randn(len(weight), generator=chance) if has_bias else None for weight in weights]
    product, x = PackedLinear(weights, biases), torch.randn(rows, weights[0].shape[1], generator=chance)
    right = torch.cat([F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)], dim=1)
    out, stream = torch.empty_like(right), torch.randn(right.shape, generator=chance)
    expected = stream + right
    product.write_to(x, out)
    product.add_to(stream, x)
    roads = [(product(x), right), (out, right), (stream, expected)]
    roads += [(product.forward_activated(x, one), activate(right, one)) for one in Activation]
    for found, wanted in roads:
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("limit", "below", "above"),
    [
        (MIN_BLOCKED_SIZE, "tiny", "blocks, all full"),
        (MIN_ONEDNN_SIZE, "blocks, the last not full", "oneDNN's"),
        (MIN_PADDED_SIZE, "oneDNN's", "far"),
    ],
)
def test_the_shapes_above_stand_on_both_sides_of_each_limit(limit, below, above):
    sizes = [sum(n * width for n, width in SHAPES[name]) for name in (below, above)]
    assert sizes[0] < limit <= sizes[1]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_product_in_int8_is_written_and_added_as_it_is_given(rows, has_bias):
    whole = torch.randint(-127, 128, (13, 7), dtype=torch.int8)
    linear = Int8Linear(whole, torch.rand(13) / 100, torch.randn(13) if has_bias else None)
    product, x, stream = PackedInt8Linear([linear], [1.0]), torch.randn(rows, 7), torch.randn(rows, 13)
    right, out = linear(x), torch.empty(rows, 13)
    expected = stream + right
    product.write_to(x, out)
    product.add_to(stream, x)
    torch.testing.assert_close((product(x), out, stream), (right, right, expected))


def test_the_first_result_can_be_scaled_and_a_changed_weight_is_seen():
    first, second, x = nn.Linear(7, 5), nn.Linear(7, 3), torch.randn(2, 7)
    packing = PrepackedWeights(first, second)
    with torch.no_grad():
        for _ in range(2):
            expected = torch.cat((first(x) * 0.5, second(x)), dim=1)
            torch.testing.assert_close(packing.packed_linear(first, second, first_scale=0.5)(x), expected)
            torch.testing.assert_close(packing.packed_linear(first, second)(x), torch.cat((first(x), second(x)), dim=1))
            first.weight.mul_(3.0)
