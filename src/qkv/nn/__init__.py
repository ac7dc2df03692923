"""Building blocks for models: attention, masks, caches, positions, norms, feed-forward and recurrent layers."""

from qkv.nn.attention import (
    Attention,
    AttentionInputs,
    HeadConfig,
    fused_attention,
    masked_softmax,
    scaled_dot_product_attention,
    use_attention_kernel,
)
from qkv.nn.block import Block, Blocks, Source
from qkv.nn.cache import KVCache, LayerCache, LayerSourceCache, RaggedAppendSlots
from qkv.nn.embedding import (
    InputEmbedding,
    PatchProjection,
    TokenEmbedding,
    Unembedding,
    check_ids_shape_dtype_range,
    check_patches_shape_and_dtype,
    split_into_patches,
)
from qkv.nn.feed_forward import FeedForward, activate
from qkv.nn.init import init_weights
from qkv.nn.mask import CAUSAL, Mask
from qkv.nn.norm import LayerNorm, RMSNorm, make_norm
from qkv.nn.positions import (
    ALiBi,
    ConcatenatedSinusoidalPositions,
    LearnedPositions,
    PositionInfo,
    RelativeBias,
    RopeScalingRule,
    RotaryEmbedding,
    SinusoidalPositions,
    alibi_slopes,
    sinusoidal_encoding,
)
from qkv.nn.recurrent import AttentiveDecoder, BidirectionalRecurrentEncoder, State, StateAttention
from qkv.nn.tap import Tap

__all__ = [
    "CAUSAL",
    "ALiBi",
    "Attention",
    "AttentionInputs",
    "AttentiveDecoder",
    "BidirectionalRecurrentEncoder",
    "Block",
    "Blocks",
    "ConcatenatedSinusoidalPositions",
    "FeedForward",
    "HeadConfig",
    "InputEmbedding",
    "KVCache",
    "LayerCache",
    "LayerNorm",
    "LayerSourceCache",
    "LearnedPositions",
    "Mask",
    "PatchProjection",
    "PositionInfo",
    "RMSNorm",
    "RaggedAppendSlots",
    "RelativeBias",
    "RopeScalingRule",
    "RotaryEmbedding",
    "SinusoidalPositions",
    "Source",
    "State",
    "StateAttention",
    "Tap",
    "TokenEmbedding",
    "Unembedding",
    "activate",
    "alibi_slopes",
    "check_ids_shape_dtype_range",
    "check_patches_shape_and_dtype",
    "fused_attention",
    "init_weights",
    "make_norm",
    "masked_softmax",
    "scaled_dot_product_attention",
    "sinusoidal_encoding",
    "split_into_patches",
    "use_attention_kernel",
]
