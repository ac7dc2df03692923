"""The product with bias and GELU in one kernel, run by Triton's interpreter: what the plain road gives, at any size."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qkv.choices import Activation
from qkv.nn import FeedForward, feed_forward
from tests.by_triton import BY_TRITON

pytestmark = BY_TRITON


@pytest.fixture
def kernel(monkeypatch):
    """Small tiles, more of them than programs."""
    from qkv.nn import linear_gelu_kernel

    monkeypatch.setattr(linear_gelu_kernel, "multiprocessor_count", lambda _: 3)
    for name, value in {"TILE": 16, "DEPTH": 16, "GROUP": 2, "PROGRAMS_PER_SM": 1}.items():
        monkeypatch.setattr(linear_gelu_kernel, name, value)
    return linear_gelu_kernel


@pytest.mark.parametrize("n_rows", [1, 13, 67])
@pytest.mark.parametrize(("n_in", "n_out"), [(8, 16), (40, 80)])
def test_it_is_gelu_of_the_product_with_its_bias(kernel, n_rows, n_in, n_out):
    generator = torch.Generator().manual_seed(n_rows)
    x = 3 * torch.randn(1, n_rows, n_in, generator=generator)
    weight, bias = torch.randn(n_out, n_in, generator=generator), 5 * torch.randn(n_out, generator=generator)
    got = kernel.fused_linear_gelu(x, weight, bias)
    torch.testing.assert_close(got, F.gelu(F.linear(x, weight, bias)), atol=1e-5, rtol=1e-5)


def test_rows_with_gaps_and_weights_off_the_16_bytes_are_the_same(kernel):
    x, weight, bias = torch.randn(7, 3, 40)[:, 1], torch.randn(32 * 24 + 1)[1:].view(32, 24), torch.randn(32)
    got = kernel.fused_linear_gelu(x[:, :24], weight, bias)
    torch.testing.assert_close(got, F.gelu(F.linear(x[:, :24], weight, bias)), atol=1e-5, rtol=1e-5)


def test_a_feedforward_that_goes_by_it_gives_what_it_gave_and_taps_see_it(kernel, monkeypatch):
    layer, x, seen = FeedForward(24, 48, activation=Activation.GELU), torch.randn(2, 13, 24), []
    layer.hidden.observe(seen.append)
    with torch.no_grad():
        plain = layer(x)
        monkeypatch.setattr(feed_forward, "can_fuse_linear_gelu", lambda *_: True)
        torch.testing.assert_close(layer(x), plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(seen[1], seen[0], atol=1e-5, rtol=1e-5)


class Doubled(nn.Linear):
    """Another layer in a linear one's place."""


def looked_at(layer):
    layer.expand.register_forward_hook(lambda *_: None)


def another(layer):
    layer.expand = Doubled(24, 48)


@pytest.mark.parametrize(
    ("changes", "after", "n_taken"),
    [({}, None, 1), ({"activation": Activation.GELU_TANH}, None, 0), ({"bias": False}, None, 0),
     ({"gated": True}, None, 0), ({}, looked_at, 0), ({}, another, 0)],
)  # fmt: skip
def test_only_a_usual_expansion_with_gelu_goes_by_it(changes, after, n_taken, monkeypatch):
    from qkv.nn import linear_gelu_kernel

    taken = []
    monkeypatch.setattr(linear_gelu_kernel, "fused_linear_gelu", lambda x, weight, bias: taken.append(1) or F.linear(x, weight, bias))
    monkeypatch.setattr(feed_forward, "can_fuse_linear_gelu", lambda *_: True)
    layer = FeedForward(24, 48, **{"activation": Activation.GELU} | changes)
    if after is not None:
        after(layer)
    layer(torch.randn(1, 13, 24))
    assert len(taken) == n_taken


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch.compile itself does
def test_a_compiled_graph_has_it_inside(kernel, monkeypatch):
    monkeypatch.setattr(feed_forward, "can_fuse_linear_gelu", lambda *_: True)
    layer, x = FeedForward(24, 48, activation=Activation.GELU), torch.randn(1, 13, 24)
    with torch.no_grad():
        found = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
        torch.testing.assert_close(found, layer.down_proj(F.gelu(layer.up_proj(x))), atol=1e-5, rtol=1e-5)
