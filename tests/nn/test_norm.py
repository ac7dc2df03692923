"""Tests of LayerNorm and RMSNorm."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.choices import NormKind
from qkv.nn.norm import LayerNorm, RMSNorm, make_norm

BATCH, N, D_MODEL = 2, 7, 5


def test_layer_norm_divides_by_the_populations_variance():
    """The numbers 1 … 5 have mean 3 and variance 2 when divided by d = 5 (2.5 when divided by d − 1)."""
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0]]])
    got = LayerNorm(5, eps=1e-12)(x)
    torch.testing.assert_close(got, (x - 3.0) / 2**0.5)


def test_layer_norm_puts_a_vector_on_the_hyperplane_at_length_root_d():
    got = LayerNorm(D_MODEL, eps=1e-12)(torch.randn(BATCH, N, D_MODEL))
    torch.testing.assert_close(got.sum(-1), torch.zeros(BATCH, N), atol=1e-5, rtol=0)
    torch.testing.assert_close(got.norm(dim=-1), torch.full((BATCH, N), D_MODEL**0.5))


def test_rms_norm_divides_by_the_root_mean_square_without_centering():
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    torch.testing.assert_close(RMSNorm(4, eps=1e-12)(x), x / 7.5**0.5)


@pytest.mark.parametrize("kind", list(NormKind))
def test_weight_and_bias_come_after_the_norm(kind):
    part, x = make_norm(kind, D_MODEL), torch.randn(BATCH, N, D_MODEL)
    with torch.no_grad():
        part.weight.fill_(1.0)
        weight = torch.arange(2.0, 2.0 + len(part.weight))
        expected = part(x) * weight
        part.weight.copy_(weight)
        if kind is NormKind.LAYER:
            part.bias.fill_(0.5)
            expected = expected + 0.5
    torch.testing.assert_close(part(x), expected)


@given(st.floats(0.5, 50), st.sampled_from(NormKind))
def test_a_norm_does_not_depend_on_the_scale_of_its_input(factor, kind):
    part, x = make_norm(kind, D_MODEL, eps=1e-12), torch.randn(1, 1, D_MODEL)
    torch.testing.assert_close(part(x * factor), part(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [NormKind.LAYER, NormKind.RMS])
def test_eps_is_added_inside_the_square_root(kind):
    x = torch.tensor([[[0.3, -0.3]]])
    got = make_norm(kind, 2, eps=0.16)(x)
    torch.testing.assert_close(got, x / 0.5)  # √(0.09 + 0.16)


def test_the_bias_can_be_left_out():
    assert [name for name, _ in make_norm(NormKind.LAYER, D_MODEL, bias=False).named_parameters()] == ["weight"]
    assert [name for name, _ in make_norm(NormKind.RMS, D_MODEL).named_parameters()] == ["weight"]
    assert [name for name, _ in make_norm(NormKind.LAYER, D_MODEL).named_parameters()] == ["weight", "bias"]
