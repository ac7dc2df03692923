"""Tests of the feed-forward layer and its activations."""

import math

import pytest
import torch
from torch.nn import functional as F

from qkv.choices import Activation
from qkv.nn import FeedForward
from qkv.nn.block import activate

BATCH, N, D_MODEL, D_FF = 2, 7, 5, 11


def reference_value(x: float, activation: Activation) -> float:
    match activation:
        case Activation.RELU:
            return max(0.0, x)
        case Activation.GELU:
            return x * (1 + math.erf(x / math.sqrt(2))) / 2
        case Activation.GELU_TANH:
            return x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
        case Activation.SILU:
            return x / (1 + math.exp(-x))


@pytest.mark.parametrize("activation", list(Activation))
def test_each_activation_is_its_formula(activation):
    points = [-3.0, -1.0, -0.1, 0.0, 0.1, 1.0, 3.0]
    got = activate(torch.tensor(points, dtype=torch.float64), activation)
    assert got.tolist() == pytest.approx([reference_value(x, activation) for x in points], abs=1e-12)


@pytest.mark.parametrize("bias", [False, True])
def test_the_output_is_down_proj_of_the_activated_up_proj(bias):
    part, x = FeedForward(D_MODEL, D_FF, bias=bias), torch.randn(BATCH, N, D_MODEL)
    assert sum(p.numel() for p in part.parameters()) == 2 * D_MODEL * D_FF + bias * (D_FF + D_MODEL)
    hidden = F.linear(x, part.up_proj.weight, part.up_proj.bias).clamp(min=0)
    torch.testing.assert_close(part(x), F.linear(hidden, part.down_proj.weight, part.down_proj.bias))


def test_the_gate_multiplies_the_up_projection():
    part = FeedForward(D_MODEL, D_FF, activation=Activation.SILU, gated=True, bias=False)
    x = torch.randn(BATCH, N, D_MODEL)
    assert sum(p.numel() for p in part.parameters()) == 3 * D_MODEL * D_FF
    gate, expanded = x @ part.gate_proj.weight.T, x @ part.up_proj.weight.T
    torch.testing.assert_close(part(x), (gate * torch.sigmoid(gate) * expanded) @ part.down_proj.weight.T)


@pytest.mark.parametrize("gated", [False, True])
def test_positions_do_not_see_each_other(gated):
    part, x = FeedForward(D_MODEL, D_FF, gated=gated), torch.randn(BATCH, N, D_MODEL)
    torch.testing.assert_close(part(x)[:, 3:4], part(x[:, 3:4]))


def test_the_hidden_tap_observes_the_input_of_the_down_projection():
    part, x = FeedForward(D_MODEL, D_FF), torch.randn(BATCH, N, D_MODEL)
    hidden = []
    part.hidden.observe(hidden.append)
    out = part(x)
    assert hidden[0].shape == (BATCH, N, D_FF)
    assert torch.equal(part.down_proj(hidden[0]), out)
