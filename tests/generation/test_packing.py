"""A prepared product gives what torch's own gives, at every size and number of rows for which it has another road."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from qkv.choices import Activation
from qkv.generation.packing import BLOCK, FAR, SMALL, TINY, Product
from qkv.nn import activate

SHAPES = {
    "tiny": [(13, 7)],
    "two tiny ones": [(13, 7), (11, 7)],
    "blocks, all full": [(10 * BLOCK, 107)],
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
    product, x = Product(weights, biases), torch.randn(rows, weights[0].shape[1], generator=chance)
    right = torch.cat([F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)], dim=1)
    out, stream = torch.empty_like(right), torch.randn(right.shape, generator=chance)
    expected = stream + right
    product.into(x, out)
    product.onto(stream, x)
    roads = [(product(x), right), (out, right), (stream, expected)]
    roads += [(product.activated(x, one), activate(right, one)) for one in Activation]
    for found, wanted in roads:
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("limit", "below", "above"),
    [(TINY, "tiny", "blocks, all full"), (SMALL, "blocks, the last not full", "oneDNN's"), (FAR, "oneDNN's", "far")],
)
def test_the_shapes_above_stand_on_both_sides_of_each_limit(limit, below, above):
    sizes = [sum(n * width for n, width in SHAPES[name]) for name in (below, above)]
    assert sizes[0] < limit <= sizes[1]
