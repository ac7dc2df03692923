"""The parts, built from numbers: one attention for all families, and everything around it."""

from qkv.nn.attention import Attention, Heads, using
from qkv.nn.block import Block, Blocks, Source
from qkv.nn.cache import AtEnds, KVCache, LayerCache, SourceCache
from qkv.nn.embedding import InputEmbedding, TokenEmbedding, Unembedding, check_ids
from qkv.nn.feedforward import FeedForward, activate
from qkv.nn.initialise import initialise
from qkv.nn.int8 import Int8Linear, check_int8
from qkv.nn.lookup import Lookup, attend, attend_fused, weights_of
from qkv.nn.mask import CAUSAL, Mask
from qkv.nn.memory import SoftMemory
from qkv.nn.norm import LayerNorm, RMSNorm, norm
from qkv.nn.packed import Packed
from qkv.nn.patches import PatchEmbedding, check_patches, cut_in_patches
from qkv.nn.positions import ConcatenatedPositions, LearnedPositions, SinusoidalPositions, sinusoid
from qkv.nn.recurrent import AttentiveDecoder, RecurrentEncoder, State, StateAttention
from qkv.nn.relation import ALiBi, Relation, RelativeBias, Rotary, Slowing, alibi_slopes
from qkv.nn.tap import Tap, is_looked_at

__all__ = [
    "CAUSAL",
    "ALiBi",
    "AtEnds",
    "Attention",
    "AttentiveDecoder",
    "Block",
    "Blocks",
    "ConcatenatedPositions",
    "FeedForward",
    "Heads",
    "InputEmbedding",
    "Int8Linear",
    "KVCache",
    "LayerCache",
    "LayerNorm",
    "LearnedPositions",
    "Lookup",
    "Mask",
    "Packed",
    "PatchEmbedding",
    "RMSNorm",
    "RecurrentEncoder",
    "Relation",
    "RelativeBias",
    "Rotary",
    "SinusoidalPositions",
    "Slowing",
    "SoftMemory",
    "Source",
    "SourceCache",
    "State",
    "StateAttention",
    "Tap",
    "TokenEmbedding",
    "Unembedding",
    "activate",
    "alibi_slopes",
    "attend",
    "attend_fused",
    "check_ids",
    "check_int8",
    "check_patches",
    "cut_in_patches",
    "initialise",
    "is_looked_at",
    "norm",
    "sinusoid",
    "using",
    "weights_of",
]
