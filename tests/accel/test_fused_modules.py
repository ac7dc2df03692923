"""Modules that replace those of the reference on a GPU."""

import pytest
import torch
from torch.nn import functional as F

from qkv.accel.cuda import fused_modules
from qkv.accel.cuda.fused_modules import activate_fast, erf_gelu_by_exp2
from qkv.choices import Activation


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_gelu_by_exp2_equals_gelu_for_every_16_bit_number(kind):
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(kind)
    x = x[x.isfinite()]
    wanted, got = x.double() * torch.special.ndtr(x.double()), erf_gelu_by_exp2(x)
    assert got.dtype == kind
    # Half a unit in the last place of the result, plus the rounding of float32.
    torch.testing.assert_close(got.double(), wanted, rtol=0.51 * torch.finfo(kind).eps, atol=1e-6)
    in_float32 = torch.linspace(-9, 9, 100_003)
    wanted = in_float32.double() * torch.special.ndtr(in_float32.double())
    torch.testing.assert_close(erf_gelu_by_exp2(in_float32).double(), wanted, rtol=0, atol=5e-7)


def test_gelu_by_exp2_is_used_only_in_compiled_inference(monkeypatch):
    x = torch.randn(2, 7)
    assert torch.equal(activate_fast(x, Activation.GELU), F.gelu(x))
    monkeypatch.setattr(fused_modules, "is_compiled_for_inference", lambda _: True)
    assert torch.equal(activate_fast(x, Activation.GELU), erf_gelu_by_exp2(x))
    assert torch.equal(activate_fast(x, Activation.GELU_TANH), F.gelu(x, approximate="tanh"))
