"""Building blocks for models: attention, masks, caches, positions, norms, feed-forward and recurrent layers."""

from qkv.accel.int8 import Int8Linear, check_int8_supported
from qkv.nn.attention import Attention, HeadConfig, use_attention_kernel
from qkv.nn.block import Block, Blocks, Source
from qkv.nn.cache import KVCache, LayerCache, LayerSourceCache, RaggedAppendSlots
from qkv.nn.dot_product_attention import AttentionInputs, fused_attention, masked_softmax, scaled_dot_product_attention
from qkv.nn.embedding import InputEmbedding, TokenEmbedding, Unembedding, check_ids_shape_dtype_range
from qkv.nn.feed_forward import FeedForward, activate
from qkv.nn.init import init_weights
from qkv.nn.mask import CAUSAL, Mask
from qkv.nn.norm import LayerNorm, RMSNorm, make_norm
from qkv.nn.patches import PatchProjection, check_patches_shape_and_dtype, split_into_patches
from qkv.nn.positions import ConcatenatedSinusoidalPositions, LearnedPositions, SinusoidalPositions, sinusoidal_encoding
from qkv.nn.recurrent import AttentiveDecoder, BidirectionalRecurrentEncoder, State, StateAttention
from qkv.nn.relative_positions import ALiBi, PositionInfo, RelativeBias, RopeScalingRule, RotaryEmbedding, alibi_slopes
from qkv.nn.soft_memory import SoftMemory
from qkv.nn.tap import Tap, has_hooks_or_is_active_tap
from qkv.nn.varlen import Varlen

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
    "Int8Linear",
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
    "SoftMemory",
    "Source",
    "State",
    "StateAttention",
    "Tap",
    "TokenEmbedding",
    "Unembedding",
    "Varlen",
    "activate",
    "alibi_slopes",
    "check_ids_shape_dtype_range",
    "check_int8_supported",
    "check_patches_shape_and_dtype",
    "fused_attention",
    "has_hooks_or_is_active_tap",
    "init_weights",
    "make_norm",
    "masked_softmax",
    "scaled_dot_product_attention",
    "sinusoidal_encoding",
    "split_into_patches",
    "use_attention_kernel",
]
