"""One fused QKV projection equals three separate ones."""

import pytest
import torch
from torch import nn

from qkv.nn import CAUSAL, Attention, HeadConfig, KVCache
from qkv.nn.positions import RotaryEmbedding

BATCH, N, D_MODEL = 2, 7, 15


@pytest.fixture(params=[True, False], ids=["bias", "no bias"])
def attention(request):
    heads = HeadConfig(n_heads=6, n_kv_heads=3, d_head=4, d_value=5)
    return Attention(D_MODEL, heads, bias=request.param)


def results(attention, at_once, monkeypatch, **options):
    monkeypatch.setattr(Attention, "_should_fuse_qkv", lambda *_: at_once)
    x = torch.randn(BATCH, N, D_MODEL, generator=torch.Generator().manual_seed(1)).requires_grad_()
    attention.zero_grad()
    y = attention(x, mask=CAUSAL, **options)
    y.square().sum().backward()
    return [y, x.grad, *(p.grad.clone() for p in attention.parameters())]


def assert_same(actual_tensors, expected_tensors):
    for actual, expected in zip(actual_tensors, expected_tensors, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_results_and_gradients_are_the_same(attention, monkeypatch):
    position_info = RotaryEmbedding(4)(torch.arange(N)[None], torch.arange(N)[None], torch.float32)
    for options in ({}, {"position_info": position_info}):
        assert_same(*(results(attention, at_once, monkeypatch, **options) for at_once in (True, False)))


def test_a_cache_gets_the_same_keys_and_values(attention, monkeypatch):
    filled = []
    for at_once in (True, False):
        cache = KVCache(n_layers=1, batch=BATCH, capacity=N, key_shape=(3, 4), value_shape=(3, 5), like=torch.ones(1))
        cache.reserve(batch=BATCH, n_new=N, attention_mask=None)
        monkeypatch.setattr(Attention, "_should_fuse_qkv", lambda *_, at_once=at_once: at_once)
        x = torch.randn(BATCH, N, D_MODEL, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            filled.append([attention(x, mask=CAUSAL, cache=cache.layers[0]), cache.keys, cache.values])
    assert_same(*filled)


def test_qkv_is_not_fused_on_a_cpu_or_with_replaced_or_hooked_projections(attention):
    class OnGPU(torch.Tensor):
        is_cuda = True

    there = torch.ones(2, 1024, D_MODEL).as_subclass(OnGPU)
    assert attention._should_fuse_qkv(there)
    assert not attention._should_fuse_qkv(there[:, :5])
    assert not attention._should_fuse_qkv(torch.ones(2, 1024, D_MODEL))
    hook = attention.v_proj.register_forward_hook(lambda *_: None)
    assert not attention._should_fuse_qkv(there)
    hook.remove()
    assert attention._should_fuse_qkv(there)
    attention.k_proj = nn.Sequential(attention.k_proj)
    assert not attention._should_fuse_qkv(there)
