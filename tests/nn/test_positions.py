"""Tests of absolute position embeddings."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.choices import SinusoidStyle
from qkv.errors import ConfigError, ContextLengthError
from qkv.nn.positions import ConcatenatedSinusoidalPositions, LearnedPositions, SinusoidalPositions, sinusoidal_encoding

BATCH, N, D_MODEL = 2, 7, 10

styles = pytest.mark.parametrize("style", list(SinusoidStyle))


def positions_range(n: int = N) -> torch.Tensor:
    return torch.arange(n)[None]


def reference_value(position: int, style: SinusoidStyle) -> list[float]:
    """Computes each number directly from its formula."""
    numbers = []
    for column in range(D_MODEL):
        if style is SinusoidStyle.HALVES:
            i, is_sine = column % (D_MODEL // 2), column < D_MODEL // 2
        else:
            i, is_sine = column // 2, column % 2 == 0
        i += style is SinusoidStyle.INTERLEAVED_FROM_ONE
        angle = position / 10000 ** (2 * i / D_MODEL)
        numbers.append(math.sin(angle) if is_sine else math.cos(angle))
    return numbers


@styles
def test_each_sinusoid_style_orders_its_frequencies_as_documented(style):
    expected = torch.tensor([[reference_value(position, style) for position in range(N)]], dtype=torch.float64)
    torch.testing.assert_close(sinusoidal_encoding(positions_range(), D_MODEL, style, dtype=torch.float64), expected)
    torch.testing.assert_close(sinusoidal_encoding(positions_range(), D_MODEL, style), expected.float())


def test_the_first_position_is_0_1_0_1_interleaved():
    assert sinusoidal_encoding(positions_range(1), 6).tolist() == [[[0, 1, 0, 1, 0, 1]]]
    assert sinusoidal_encoding(positions_range(1), 6, SinusoidStyle.HALVES).tolist() == [[[0, 0, 0, 1, 1, 1]]]


@styles
@pytest.mark.parametrize("d_model", [4, 64])
def test_any_two_of_the_first_thousand_rows_differ(style, d_model):
    rows = sinusoidal_encoding(positions_range(1000), d_model, style)[0]
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    assert float((distances + torch.eye(1000)).min()) > 1e-3


@given(st.integers(0, 500), st.integers(0, 500), st.sampled_from(SinusoidStyle))
def test_the_dot_product_of_two_rows_depends_only_on_their_distance(position, distance, style):
    both = torch.tensor([[0, distance, position, position + distance]])
    start, away, here, there = sinusoidal_encoding(both, D_MODEL, style, dtype=torch.float64)[0]
    torch.testing.assert_close(start @ away, here @ there)


def test_far_positions_are_exact_although_float32_cannot_hold_their_angles():
    got = float(sinusoidal_encoding(torch.tensor([[100_003]]), 2)[0, 0, 0])
    assert got == pytest.approx(math.sin(100_003), abs=1e-6)


@styles
def test_sinusoids_are_added_to_the_tokens(style):
    tokens = torch.randn(BATCH, N, D_MODEL)
    got = SinusoidalPositions(style=style)(tokens, positions_range())
    torch.testing.assert_close(got, tokens + sinusoidal_encoding(positions_range(), D_MODEL, style))


@styles
def test_concatenated_positions_are_projected_to_the_models_width(style):
    part, tokens = ConcatenatedSinusoidalPositions(D_MODEL, style=style), torch.randn(BATCH, N, D_MODEL)
    assert sum(parameter.numel() for parameter in part.parameters()) == 2 * D_MODEL**2
    of_token, of_position = part.project.weight.split(D_MODEL, dim=1)
    expected = tokens @ of_token.T + sinusoidal_encoding(positions_range(), D_MODEL, style) @ of_position.T
    torch.testing.assert_close(part(tokens, positions_range()), expected)


@pytest.mark.parametrize("offset", [0, 2])
def test_learned_positions_are_rows_of_a_table_after_the_offset(offset):
    part, tokens = LearnedPositions(11, D_MODEL, offset=offset), torch.randn(BATCH, N, D_MODEL)
    assert part.table.weight.shape == (11 + offset, D_MODEL)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [3, 4, 5, 6, 7, 9, 10]])
    expected = torch.stack([tokens[b] + part.table.weight[positions[b] + offset] for b in range(BATCH)])
    assert torch.equal(part(tokens, positions), expected)


def test_more_tokens_than_the_table_has_rows_are_rejected():
    part = LearnedPositions(5, D_MODEL, offset=2)
    with pytest.raises(ContextLengthError, match=r"\b7 tokens\b.*\b5\b"):
        part(torch.randn(BATCH, N, D_MODEL), positions_range())
    with pytest.raises(ContextLengthError, match=r"\b6 tokens\b.*\b5\b"):
        part(torch.randn(1, 1, D_MODEL), torch.tensor([[5]]))


def test_an_odd_width_is_rejected():
    with pytest.raises(ConfigError, match="d_model=7"):
        sinusoidal_encoding(positions_range(), 7)
