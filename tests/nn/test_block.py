"""Tests of blocks: residual additions, norm positions, taps and stacks."""

import pytest
import torch

from qkv.choices import NormPosition
from qkv.errors import ConfigError
from qkv.nn import CAUSAL, Attention, Block, Blocks, FeedForward, HeadConfig, Mask, Source
from qkv.nn.norm import LayerNorm
from qkv.nn.positions import ALiBi

BATCH, N, N_SOURCE, D_MODEL, N_HEADS, D_FF = 2, 7, 5, 6, 3, 11


def block(norm_position: NormPosition = NormPosition.PRE, *, cross: bool = False, dropout: float = 0.0) -> Block:
    built = Block(
        attention=Attention(D_MODEL, HeadConfig.split(D_MODEL, N_HEADS)),
        cross_attention=Attention(D_MODEL, HeadConfig.split(D_MODEL, N_HEADS)) if cross else None,
        feed_forward=FeedForward(D_MODEL, D_FF),
        norms=[LayerNorm(D_MODEL) for _ in range(3 if cross else 2)],
        norm_position=norm_position,
        dropout=dropout,
    )
    with torch.no_grad():  # different weights for each norm, so that swapped norms are detected
        for parameter in built.parameters():
            parameter.normal_(std=0.5)
    return built


def stream() -> torch.Tensor:
    return torch.randn(BATCH, N, D_MODEL)


def test_a_pre_norm_block_adds_sublayer_outputs_of_the_normed_stream():
    part, x = block(NormPosition.PRE), stream()
    mid = x + part.attention(part.attention_norm(x), mask=CAUSAL)
    expected = mid + part.feed_forward(part.feed_forward_norm(mid))
    torch.testing.assert_close(part(x, mask=CAUSAL), expected)


def test_a_post_norm_block_norms_each_sum():
    part, x = block(NormPosition.POST), stream()
    mid = part.attention_norm(x + part.attention(x, mask=CAUSAL))
    expected = part.feed_forward_norm(mid + part.feed_forward(mid))
    torch.testing.assert_close(part(x, mask=CAUSAL), expected)


def test_cross_attention_runs_between_attention_and_feed_forward():
    part, x, states = block(NormPosition.PRE, cross=True), stream(), torch.randn(BATCH, N_SOURCE, D_MODEL)
    source = Source(states=states, mask=Mask(key_padding_mask=torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]).bool()))
    mid = x + part.attention(part.attention_norm(x), mask=CAUSAL)
    crossed = mid + part.cross_attention(part.cross_attention_norm(mid), source=states, mask=source.mask)
    expected = crossed + part.feed_forward(part.feed_forward_norm(crossed))
    torch.testing.assert_close(part(x, mask=CAUSAL, source=source), expected)


def test_padding_of_the_source_changes_nothing():
    part, x, states = block(cross=True), stream(), torch.randn(BATCH, N_SOURCE, D_MODEL)
    attention_mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 0]]).bool()
    garbage = states + 100 * (~attention_mask)[..., None]
    got, expected = (
        part(x, source=Source(states=s, mask=Mask(key_padding_mask=attention_mask))) for s in (garbage, states)
    )
    assert torch.equal(got, expected)
    torch.testing.assert_close(part(x, source=Source(states=states[:, :4])), expected)


@pytest.mark.parametrize("norm_position", list(NormPosition))
def test_the_taps_observe_the_residual_stream_and_sublayer_outputs(norm_position):
    part, x, activations = block(norm_position, cross=True), stream(), {}
    names = ["resid_pre", "attention_out", "resid_mid", "cross_attention_out", "resid_cross"]
    for name in (*names, "feed_forward_out", "resid_post"):
        getattr(part, name).observe(lambda passing, name=name: activations.__setitem__(name, passing))
    out = part(x, source=Source(states=torch.randn(BATCH, N_SOURCE, D_MODEL)))
    assert list(activations) == [*names, "feed_forward_out", "resid_post"]
    assert torch.equal(activations["resid_pre"], x)
    assert torch.equal(activations["resid_post"], out)
    for before, write, after, norm in (
        ("resid_pre", "attention_out", "resid_mid", part.attention_norm),
        ("resid_mid", "cross_attention_out", "resid_cross", part.cross_attention_norm),
        ("resid_cross", "feed_forward_out", "resid_post", part.feed_forward_norm),
    ):
        total = activations[before] + activations[write]
        torch.testing.assert_close(activations[after], norm(total) if norm_position is NormPosition.POST else total)


def test_dropout_is_only_active_in_training():
    part, x = block(dropout=0.5), stream()
    part.eval()
    assert torch.equal(part(x), part(x))
    part.train()
    assert not torch.equal(part(x), part(x))


@pytest.mark.parametrize("mask", [None, CAUSAL, Mask(causal=True, sliding_window=2)])
def test_a_stack_is_its_blocks_one_after_another(mask):
    first, second, x = block(), block(), stream()
    positions = torch.arange(N)[None]
    alibi = ALiBi(N_HEADS)
    got = Blocks([first, second])(x, positions=positions, relative_positions=alibi, mask=mask)
    position_info = alibi(positions, positions)
    expected = second(first(x, mask=mask, position_info=position_info), mask=mask, position_info=position_info)
    torch.testing.assert_close(got, expected)


def test_every_block_of_a_stack_reads_the_same_source():
    first, second, x = block(cross=True), block(cross=True), stream()
    source = Source(states=torch.randn(BATCH, N_SOURCE, D_MODEL))
    got = Blocks([first, second])(x, positions=torch.arange(N)[None], mask=CAUSAL, source=source)
    expected = second(first(x, mask=CAUSAL, source=source), mask=CAUSAL, source=source)
    torch.testing.assert_close(got, expected)


def test_a_source_without_cross_attention_and_the_reverse_are_rejected():
    source = Source(states=torch.randn(BATCH, N_SOURCE, D_MODEL))
    with pytest.raises(ConfigError, match="source"):
        block()(stream(), source=source)
    with pytest.raises(ConfigError, match="source"):
        block(cross=True)(stream())
