"""Modules that replace those of the reference on a GPU."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qkv.accel.cuda import fused_modules
from qkv.accel.cuda.fused_modules import activate_fast, erf_gelu_by_exp2, find_fused_replacement, should_fuse_qkv
from qkv.choices import Activation
from qkv.nn import Attention
from qkv.nn.attention import HeadConfig
from qkv.nn.cache import KVCache
from qkv.nn.mask import CAUSAL
from qkv.nn.positions import RotaryEmbedding


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


BATCH, N, D_MODEL = 2, 7, 15


@pytest.fixture(params=[True, False], ids=["bias", "no bias"])
def attention(request, device):
    heads = HeadConfig(n_heads=6, n_kv_heads=3, d_head=4, d_value=5)
    return Attention(D_MODEL, heads, bias=request.param).to(device)


@pytest.fixture
def fused_attention(attention, monkeypatch):
    """The same layer, which computes queries, keys and values with one matmul for any number of tokens."""
    monkeypatch.setattr(fused_modules, "should_fuse_qkv", lambda _: True)
    return find_fused_replacement(attention)


def states(device):
    return torch.randn(BATCH, N, D_MODEL, generator=torch.Generator().manual_seed(1)).to(device)


def output_and_gradients(attention, device, **options):
    x = states(device).requires_grad_()
    attention.zero_grad()
    y = attention(x, mask=CAUSAL, **options)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad.clone() for parameter in attention.parameters())]


def test_fused_qkv_gives_the_same_results_and_gradients(attention, fused_attention, device, assert_agree):
    positions = torch.arange(N, device=device)[None]
    for options in ({}, {"position_info": RotaryEmbedding(4)(positions, positions, torch.float32)}):
        actual, expected = (output_and_gradients(layer, device, **options) for layer in (fused_attention, attention))
        for tensor, eager_tensor in zip(actual, expected, strict=True):
            assert_agree(tensor, eager_tensor)


@torch.no_grad()
def test_fused_qkv_fills_a_cache_with_the_same_keys_and_values(attention, fused_attention, device, assert_agree):
    results = []
    for layer in (fused_attention, attention):
        like = torch.ones(1, device=device)
        cache = KVCache(n_layers=1, batch=BATCH, capacity=N, key_shape=(3, 4), value_shape=(3, 5), like=like)
        cache.reserve(batch=BATCH, n_new=N, attention_mask=None)
        results.append([layer(states(device), mask=CAUSAL, cache=cache.layers[0]), cache.keys, cache.values])
    for tensor, eager_tensor in zip(*results, strict=True):
        assert_agree(tensor, eager_tensor)


class OnGPU(torch.Tensor):
    is_cuda = True


def test_qkv_is_fused_on_a_gpu_with_many_tokens():
    x = torch.ones(2, 1024, D_MODEL)
    assert should_fuse_qkv(x.as_subclass(OnGPU))
    assert not should_fuse_qkv(x.as_subclass(OnGPU)[:, :5])
    assert not should_fuse_qkv(x)


def test_qkv_is_not_fused_with_replaced_or_hooked_projections(attention, fused_attention, device):
    calls = []
    hook = attention.v_proj.register_forward_hook(lambda *_: calls.append("hook"))
    fused_attention(states(device))
    hook.remove()
    fused_attention(states(device))
    attention.k_proj = nn.Sequential(attention.k_proj)
    attention.k_proj.register_forward_hook(lambda *_: calls.append("replaced"))
    fused_attention(states(device))
    assert calls == ["hook", "replaced"]
