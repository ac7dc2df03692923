"""Building blocks for models: attention, masks, caches, positions, norms, feed-forward and recurrent layers.

The docstrings refer to five lectures, A to E. `docs/mission.md` lists their topics.
"""

from qkv.nn.attention import Attention, AttentionInputs, HeadConfig, scaled_dot_product_attention, use_attention_kernel
from qkv.nn.block import Block, Blocks, FeedForward, Source
from qkv.nn.cache import KVCache
from qkv.nn.embedding import InputEmbedding, PatchProjection, TokenEmbedding, Unembedding
from qkv.nn.mask import CAUSAL, Mask
from qkv.nn.tap import Tap

__all__ = [
    "CAUSAL",
    "Attention",
    "AttentionInputs",
    "Block",
    "Blocks",
    "FeedForward",
    "HeadConfig",
    "InputEmbedding",
    "KVCache",
    "Mask",
    "PatchProjection",
    "Source",
    "Tap",
    "TokenEmbedding",
    "Unembedding",
    "scaled_dot_product_attention",
    "use_attention_kernel",
]
