"""Tests of the fused linear + GELU kernel in Triton's interpreter, compared with the eager implementation."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qkv.choices import Activation
from qkv.nn import FeedForward, feed_forward
from tests.triton_marks import TRITON_INTERPRETER_MARKS

pytestmark = TRITON_INTERPRETER_MARKS


@pytest.fixture
def kernel(monkeypatch):
    """The kernel module with small tiles, so that there are more tiles than programs."""
    from qkv.nn import linear_gelu_kernel

    monkeypatch.setattr(linear_gelu_kernel, "multiprocessor_count", lambda _: 3)
    for name, value in {"TILE": 16, "DEPTH": 16, "GROUP": 2, "PROGRAMS_PER_SM": 1}.items():
        monkeypatch.setattr(linear_gelu_kernel, name, value)
    return linear_gelu_kernel


@pytest.mark.parametrize("n_rows", [1, 13, 67])
@pytest.mark.parametrize(("n_in", "n_out"), [(8, 16), (40, 80)])
def test_the_kernel_equals_linear_then_gelu(kernel, n_rows, n_in, n_out):
    generator = torch.Generator().manual_seed(n_rows)
    x = 3 * torch.randn(1, n_rows, n_in, generator=generator)
    weight, bias = torch.randn(n_out, n_in, generator=generator), 5 * torch.randn(n_out, generator=generator)
    got = kernel.fused_linear_gelu(x, weight, bias)
    torch.testing.assert_close(got, F.gelu(F.linear(x, weight, bias)), atol=1e-5, rtol=1e-5)


def test_strided_rows_and_unaligned_weights_give_the_same_result(kernel):
    x, weight, bias = torch.randn(7, 3, 40)[:, 1], torch.randn(32 * 24 + 1)[1:].view(32, 24), torch.randn(32)
    got = kernel.fused_linear_gelu(x[:, :24], weight, bias)
    torch.testing.assert_close(got, F.gelu(F.linear(x[:, :24], weight, bias)), atol=1e-5, rtol=1e-5)


def test_a_fused_feed_forward_gives_the_same_result_and_its_taps_still_work(kernel, monkeypatch):
    layer, x, hidden = FeedForward(24, 48, activation=Activation.GELU), torch.randn(2, 13, 24), []
    layer.hidden.observe(hidden.append)
    with torch.no_grad():
        plain = layer(x)
        monkeypatch.setattr(feed_forward, "should_fuse_linear_gelu_for_inference", lambda *_: True)
        torch.testing.assert_close(layer(x), plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(hidden[1], hidden[0], atol=1e-5, rtol=1e-5)


class SubclassedLinear(nn.Linear):
    """A layer that replaces a plain linear layer."""


def add_forward_hook(layer):
    layer.up_proj.register_forward_hook(lambda *_: None)


def replace_with_subclass(layer):
    layer.up_proj = SubclassedLinear(24, 48)


@pytest.mark.parametrize(
    ("changes", "after", "n_calls"),
    [({}, None, 1), ({"activation": Activation.GELU_TANH}, None, 0), ({"bias": False}, None, 0),
     ({"gated": True}, None, 0), ({}, add_forward_hook, 0), ({}, replace_with_subclass, 0)],
)  # fmt: skip
def test_only_an_unmodified_up_proj_with_gelu_is_fused(changes, after, n_calls, monkeypatch):
    from qkv.nn import linear_gelu_kernel

    calls = []
    monkeypatch.setattr(
        linear_gelu_kernel, "fused_linear_gelu", lambda x, weight, bias: calls.append(1) or F.linear(x, weight, bias)
    )
    monkeypatch.setattr(feed_forward, "should_fuse_linear_gelu_for_inference", lambda *_: True)
    layer = FeedForward(24, 48, **{"activation": Activation.GELU} | changes)
    if after is not None:
        after(layer)
    layer(torch.randn(1, 13, 24))
    assert len(calls) == n_calls


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch.compile
def test_a_compiled_graph_contains_the_kernel(kernel, monkeypatch):
    monkeypatch.setattr(feed_forward, "should_fuse_linear_gelu_for_inference", lambda *_: True)
    layer, x = FeedForward(24, 48, activation=Activation.GELU), torch.randn(1, 13, 24)
    with torch.no_grad():
        found = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
        torch.testing.assert_close(found, layer.down_proj(F.gelu(layer.up_proj(x))), atol=1e-5, rtol=1e-5)
