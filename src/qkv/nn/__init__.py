"""Building blocks of the models: attention, masks, caches, positions, norms, feed-forward and recurrent layers."""

from qkv.nn.attention import Attention, HeadConfig, use_attention_kernel
from qkv.nn.block import Block, Blocks, Source
from qkv.nn.cache import AppendSlots, KVCache, LayerCache, LayerSourceCache
from qkv.nn.dot_product_attention import AttentionInputs, fused_attention, masked_softmax, scaled_dot_product_attention
from qkv.nn.embedding import InputEmbedding, TokenEmbedding, Unembedding, check_ids
from qkv.nn.feed_forward import FeedForward, activate
from qkv.nn.init import init_weights
from qkv.nn.int8 import Int8Linear, check_int8
from qkv.nn.mask import CAUSAL, Mask
from qkv.nn.norm import LayerNorm, RMSNorm, make_norm
from qkv.nn.patches import PatchEmbedding, check_patches, split_into_patches
from qkv.nn.positions import ConcatenatedPositions, LearnedPositions, SinusoidalPositions, sinusoidal_encoding
from qkv.nn.recurrent import AttentiveDecoder, RecurrentEncoder, State, StateAttention
from qkv.nn.relative_positions import ALiBi, PositionInfo, RelativeBias, RopeScalingRule, RotaryEmbedding, alibi_slopes
from qkv.nn.soft_memory import SoftMemory
from qkv.nn.tap import Tap, has_forward_hooks
from qkv.nn.varlen import Varlen

__all__ = [
    "CAUSAL",
    "ALiBi",
    "AppendSlots",
    "Attention",
    "AttentionInputs",
    "AttentiveDecoder",
    "Block",
    "Blocks",
    "ConcatenatedPositions",
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
    "PatchEmbedding",
    "PositionInfo",
    "RMSNorm",
    "RecurrentEncoder",
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
    "check_ids",
    "check_int8",
    "check_patches",
    "fused_attention",
    "has_forward_hooks",
    "init_weights",
    "make_norm",
    "masked_softmax",
    "scaled_dot_product_attention",
    "sinusoidal_encoding",
    "split_into_patches",
    "use_attention_kernel",
]
