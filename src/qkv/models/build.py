"""Build the modules of a model from its config."""

from dataclasses import asdict

import qkv.nn as nn
from qkv.choices import PositionKind
from qkv.config import TransformerConfig
from qkv.nn import positions
from qkv.nn.norm import Norm


def build_norm(config: TransformerConfig) -> Norm:
    return nn.make_norm(config.norm, config.d_model, eps=config.norm_eps, bias=config.norm_bias)


def build_head_config(config: TransformerConfig) -> nn.HeadConfig:
    return nn.HeadConfig(
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        d_head=config.d_head,
        d_value=config.d_value,
        combination=config.head_combination,
    )


def build_attention(config: TransformerConfig) -> nn.Attention:
    return nn.Attention(
        config.d_model,
        build_head_config(config),
        bias=config.attention_bias,
        output_projection=config.output_projection,
        scale_scores=config.scale_scores,
        dropout=config.dropout,
    )


def build_blocks(config: TransformerConfig, n_layers: int, *, cross_attention: bool = False) -> nn.Blocks:
    def build_block() -> nn.Block:
        return nn.Block(
            attention=build_attention(config),
            cross_attention=build_attention(config) if cross_attention else None,
            feed_forward=nn.FeedForward(
                config.d_model,
                config.d_ff,
                activation=config.activation,
                gated=config.gated,
                bias=config.feed_forward_bias,
            ),
            norms=[build_norm(config) for _ in range(3 if cross_attention else 2)],
            norm_position=config.norm_position,
            dropout=config.dropout,
        )

    return nn.Blocks([build_block() for _ in range(n_layers)])


def build_relative_positions(
    config: TransformerConfig, *, bidirectional: bool
) -> positions.RotaryEmbedding | positions.ALiBi | positions.RelativeBias | None:
    match config.positions:
        case PositionKind.ROTARY:
            scaling = None if config.rope_scaling is None else positions.RopeScalingRule(**asdict(config.rope_scaling))
            return positions.RotaryEmbedding(config.d_head, theta=config.rope_theta, scaling=scaling)
        case PositionKind.ALIBI:
            return positions.ALiBi(config.n_heads)
        case PositionKind.RELATIVE:
            return positions.RelativeBias(
                config.n_heads,
                n_buckets=config.relative_buckets,
                max_distance=config.relative_max_distance,
                bidirectional=bidirectional,
            )
        case _:
            return None


def build_embedding(
    config: TransformerConfig, tokens: nn.TokenEmbedding | nn.PatchProjection, *, n_segments: int | None = None
) -> nn.InputEmbedding:
    match config.positions:
        case PositionKind.LEARNED:
            position = positions.LearnedPositions(config.context_length, config.d_model, offset=config.position_offset)
        case PositionKind.SINUSOIDAL:
            position = positions.SinusoidalPositions(style=config.sinusoid)
        case PositionKind.CONCATENATED:
            position = positions.ConcatenatedSinusoidalPositions(config.d_model, style=config.sinusoid)
        case _:
            position = None
    return nn.InputEmbedding(
        tokens,
        position=position,
        n_segments=n_segments,
        scale=config.d_model**0.5 if config.scale_embedding else 1.0,
        norm=build_norm(config) if config.embedding_norm else None,
        dropout=config.dropout,
    )


def build_unembedding(config: TransformerConfig, tokens: nn.TokenEmbedding) -> nn.Unembedding:
    return nn.Unembedding(
        config.vocab_size,
        config.d_model,
        tied_to=tokens if config.tie_embeddings else None,
        bias=config.unembedding_bias,
        scale=config.d_model**-0.5 if config.scale_logits else 1.0,
    )
