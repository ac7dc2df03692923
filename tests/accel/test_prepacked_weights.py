"""Packed linear layers equal torch's linear for all sizes and numbers of rows with separate implementations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from qkv.accel.cpu.onednn_linear import MIN_ONEDNN_SIZE
from qkv.accel.cpu.prepacked_weights import (
    BLOCK_COLUMNS,
    MIN_BLOCKED_SIZE,
    MIN_PADDED_SIZE,
    ConcatenatedLinear,
    PackedInt8Linear,
    PrepackedWeights,
)
from qkv.accel.int8 import Int8Linear
from qkv.choices import Activation
from qkv.nn.block import activate

SHAPES = {
    "tiny": [(13, 7)],
    "two tiny weights": [(13, 7), (11, 7)],
    "blocks, all full": [(10 * BLOCK_COLUMNS, 107)],
    "blocks, the last not full": [(331, 101)],
    "blocks of two weights": [(331, 101), (53, 101)],
    "oneDNN": [(331, 401)],
    "larger than the caches": [(1031, 1021)],
}


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(SHAPES)), st.integers(1, 5), st.booleans())
def test_a_packed_linear_equals_linear(name, rows, has_bias):
    generator = torch.Generator().manual_seed(rows)
    weights = [torch.randn(shape, generator=generator) for shape in SHAPES[name]]
    biases = [torch.randn(len(weight), generator=generator) if has_bias else None for weight in weights]
    packed, x = ConcatenatedLinear(weights, biases), torch.randn(rows, weights[0].shape[1], generator=generator)
    expected_output = torch.cat(
        [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)], dim=1
    )
    out, residual = torch.empty_like(expected_output), torch.randn(expected_output.shape, generator=generator)
    expected = residual + expected_output
    packed.write_to(x, out)
    packed.add_to(residual, x)
    results = [(packed(x), expected_output), (out, expected_output), (residual, expected)]
    results += [
        (packed.forward_activated(x, activation), activate(expected_output, activation)) for activation in Activation
    ]
    for actual, wanted in results:
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("limit", "below", "above"),
    [
        (MIN_BLOCKED_SIZE, "tiny", "blocks, all full"),
        (MIN_ONEDNN_SIZE, "blocks, the last not full", "oneDNN"),
        (MIN_PADDED_SIZE, "oneDNN", "larger than the caches"),
    ],
)
def test_the_shapes_cover_both_sides_of_each_size_limit(limit, below, above):
    sizes = [sum(n * width for n, width in SHAPES[name]) for name in (below, above)]
    assert sizes[0] < limit <= sizes[1]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_packed_int8_linear_equals_the_int8_linear(rows, has_bias):
    int8_weight = torch.randint(-127, 128, (13, 7), dtype=torch.int8)
    linear = Int8Linear(int8_weight, torch.rand(13) / 100, torch.randn(13) if has_bias else None)
    packed, x, residual = PackedInt8Linear([linear], [1.0]), torch.randn(rows, 7), torch.randn(rows, 13)
    expected_output, out = linear(x), torch.empty(rows, 13)
    expected = residual + expected_output
    packed.write_to(x, out)
    packed.add_to(residual, x)
    torch.testing.assert_close((packed(x), out, residual), (expected_output, expected_output, expected))


def test_the_first_output_can_be_scaled_and_changed_weights_are_repacked():
    first, second, x = nn.Linear(7, 5), nn.Linear(7, 3), torch.randn(2, 7)
    prepacked = PrepackedWeights()
    with torch.no_grad():
        for _ in range(2):
            expected = torch.cat((first(x) * 0.5, second(x)), dim=1)
            torch.testing.assert_close(prepacked.packed_linear(first, second, first_scale=0.5)(x), expected)
            torch.testing.assert_close(
                prepacked.packed_linear(first, second)(x), torch.cat((first(x), second(x)), dim=1)
            )
            first.weight.mul_(3.0)
