"""The fused kernel for linear + GELU equals the eager implementation, on a GPU or in Triton's interpreter."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qkv.accel.cuda import fused_modules
from qkv.accel.cuda.compile_checks import TILE
from qkv.accel.cuda.fused_modules import find_fused_replacement
from qkv.choices import Activation
from qkv.nn import FeedForward

# Not bfloat16, because Triton's interpreter multiplies matrices of bfloat16 numbers as if they were integers.
DTYPE = torch.float16


@pytest.fixture
def kernel(kernel_device, monkeypatch):
    """The kernel module with so few programs that each one computes several tiles."""
    from qkv.accel.cuda import linear_gelu_kernel

    if kernel_device.type == "cuda" and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("the kernel requires the tensor memory accelerator of a Hopper GPU")
    monkeypatch.setattr(linear_gelu_kernel, "multiprocessor_count", lambda _: 1)
    return linear_gelu_kernel


def random_tensor(*shape, device, scale=1.0):
    generator = torch.Generator().manual_seed(sum(shape))
    return (scale * torch.randn(*shape, generator=generator)).to(device, DTYPE)


def assert_equals_linear_then_gelu(actual, x, weight, bias, assert_agree):
    expected = F.gelu(F.linear(x.float(), weight.float(), bias.float())).to(DTYPE)
    assert_agree(actual, expected)


@pytest.mark.parametrize(("n_rows", "n_in", "n_out"), [(1, 8, TILE), (13, 40, 2 * TILE), (2 * TILE + 1, 72, 3 * TILE)])
def test_the_kernel_equals_linear_then_gelu(kernel, kernel_device, n_rows, n_in, n_out, assert_agree):
    x = random_tensor(1, n_rows, n_in, device=kernel_device, scale=3)
    weight, bias = random_tensor(n_out, n_in, device=kernel_device), random_tensor(n_out, device=kernel_device, scale=5)
    assert_equals_linear_then_gelu(kernel.fused_linear_gelu(x, weight, bias), x, weight, bias, assert_agree)


def test_strided_rows_and_unaligned_weights_give_the_same_result(kernel, kernel_device, assert_agree):
    x = random_tensor(7, 3, 40, device=kernel_device)[:, 1, :24]
    weight = random_tensor(TILE * 24 + 1, device=kernel_device)[1:].view(TILE, 24)
    bias = random_tensor(TILE, device=kernel_device)
    assert_equals_linear_then_gelu(kernel.fused_linear_gelu(x, weight, bias), x, weight, bias, assert_agree)


@pytest.fixture
def fused_layer(kernel, kernel_device, monkeypatch):
    """A feed-forward layer that uses the kernel for every shape."""
    monkeypatch.setattr(fused_modules, "should_fuse_linear_gelu_for_inference", lambda *_: True)
    layer = FeedForward(24, TILE, activation=Activation.GELU).to(kernel_device, DTYPE)
    return find_fused_replacement(layer)


def test_a_fused_feed_forward_gives_the_same_result_and_its_taps_still_work(fused_layer, kernel_device, assert_agree):
    x, hidden = random_tensor(2, 13, 24, device=kernel_device), []
    fused_layer.hidden.observe(hidden.append)
    with torch.no_grad():
        expected = FeedForward.forward(fused_layer, x)
        assert_agree(fused_layer(x), expected)
    assert_agree(hidden[1], hidden[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch.compile
def test_a_compiled_graph_contains_the_kernel(fused_layer, kernel_device, assert_agree):
    x, operators = random_tensor(1, 13, 24, device=kernel_device), []

    def record_operators(graph, _inputs):
        operators.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    with torch.no_grad():
        actual = torch.compile(fused_layer, fullgraph=True, backend=record_operators)(x)
        assert_agree(actual, FeedForward.forward(fused_layer, x))
    assert sum("fused_linear_gelu" in operator for operator in operators) == 1


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
def test_only_an_unmodified_up_proj_with_gelu_is_fused(kernel_device, changes, after, n_calls, monkeypatch):
    from qkv.accel.cuda import linear_gelu_kernel

    calls = []
    monkeypatch.setattr(
        linear_gelu_kernel, "fused_linear_gelu", lambda x, weight, bias: calls.append(1) or F.linear(x, weight, bias)
    )
    monkeypatch.setattr(fused_modules, "should_fuse_linear_gelu_for_inference", lambda *_: True)
    layer = FeedForward(24, 48, **{"activation": Activation.GELU} | changes)
    if after is not None:
        after(layer)
    find_fused_replacement(layer)(torch.randn(1, 13, 24))
    assert len(calls) == n_calls
