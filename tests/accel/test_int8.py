"""Tests of the int8 linear layer."""

import pytest
import torch
from torch.nn import functional as F

from qkv.accel.int8 import Int8Linear
from qkv.errors import InputError


def random_int8_linear(n_out, n_in=37, *, has_bias=True):
    quantized = torch.randint(-127, 128, (n_out, n_in), dtype=torch.int8)
    scale = torch.rand(n_out) / 100
    scale[0] = 0.0
    bias = torch.randn(n_out) if has_bias else None
    return Int8Linear(quantized * (scale > 0)[:, None], scale, bias), quantized.float() * scale[:, None], bias


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("rows", [(1,), (5,), (3, 2)])
def test_the_error_of_a_row_is_at_most_half_a_quantization_step(rows, has_bias):
    """This holds even next to very large rows. A row of zeros gives exactly the bias."""
    linear, weight, bias = random_int8_linear(11, has_bias=has_bias)
    x = torch.randn(*rows, 37)
    x[0] *= 1000.0
    x[-1, ..., :] *= 1e-6
    # There are 127 steps between the smallest and the largest value, and each value is off by at most half a step.
    allowed = 2 * x.abs().amax(-1, keepdim=True) / 127 / 2 * weight.abs().sum(1) * 1.01
    assert bool(((linear(x) - F.linear(x, weight, bias)).abs() <= allowed + 1e-5).all())
    assert torch.equal(linear(torch.zeros(2, 37)), torch.zeros(2, 11) if bias is None else bias.expand(2, 11))


def test_concatenated_layers_give_identical_results():
    parts = [random_int8_linear(n)[0] for n in (11, 3, 7)]
    x = torch.randn(5, 37)
    both = Int8Linear.concatenate(parts, [0.25, 1.0, 2.0])
    assert torch.equal(
        both(x), torch.cat([part(x) * scale for part, scale in zip(parts, [0.25, 1.0, 2.0], strict=True)], 1)
    )


def test_an_unsupported_quantized_engine_is_rejected(monkeypatch):
    monkeypatch.setattr(type(torch.backends.quantized), "engine", "qnnpack", raising=False)
    with pytest.raises(InputError, match=r"FBGEMM.*'qnnpack'"):
        random_int8_linear(3)
