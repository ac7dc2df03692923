"""Run a fast BERT encoder on a CPU with prepacked weights.

The results match those of the reference implementation `BERT.forward` up to rounding. Queries, keys and values are
computed by one matmul, the activation is fused into the preceding matmul, and no taps are called.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from qkv.accel.cpu.decode_engine import as_linear
from qkv.accel.cpu.prepacked_weights import PrepackedWeights
from qkv.choices import NormPosition
from qkv.data.sampler import batch_by_length
from qkv.generation.decode_engine import TokenLists, right_pad_sequences
from qkv.models import BERT
from qkv.models.stack import check_length, position_ids_reserving_cache
from qkv.nn import Block
from qkv.tensors import AttentionMask, Ids, Residual

CPU = torch.device("cpu")
MAX_BATCH_TOKENS = 512
"""Maximum number of tokens in a batch, including padding. Small batches are fastest because they fit into the cache."""


class CPUEncoder:
    """Encoder that computes the final states of a BERT from a snapshot of its weights.

    Later changes to the weights have no effect, so create a new instance for each group of batches.
    """

    def __init__(self, model: BERT, prepacked: PrepackedWeights) -> None:
        self._model = model
        self._blocks = [_EncoderBlock(block, prepacked) for block in model.blocks if isinstance(block, Block)]

    def group(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        return batch_by_length(lengths, MAX_BATCH_TOKENS)

    def encode(self, ids: TokenLists, segments: TokenLists | None = None) -> Residual:
        config = self._model.config
        padded_ids, attention_mask = right_pad_sequences(ids, CPU, config.vocab_size)
        padded_segments = None if segments is None else right_pad_sequences(segments, CPU, config.n_segments)[0]
        return self.forward(padded_ids, segments=padded_segments, attention_mask=attention_mask)

    def forward(
        self, ids: Ids, *, segments: Ids | None = None, attention_mask: AttentionMask | None = None
    ) -> Residual:
        model = self._model
        check_length(ids.shape[1], model.config.context_length)
        x = model.embedding(ids, position_ids_reserving_cache(ids, attention_mask=attention_mask), segments)
        mask = None if attention_mask is None else attention_mask[:, None, None].expand(-1, -1, ids.shape[1], -1)
        for block in self._blocks:
            x = block(x, mask)
        return model.final_norm(x)


class _EncoderBlock:
    """Transformer block with bidirectional attention and prepacked weights."""

    def __init__(self, block: Block, prepacked: PrepackedWeights) -> None:
        attention, feed_forward = block.attention, block.feed_forward
        self._is_pre_norm = block.norm_position is NormPosition.PRE
        self._attention_norm, self._feed_forward_norm = block.attention_norm, block.feed_forward_norm
        self._qkv_proj = prepacked.packed_linear(attention.q_proj, attention.k_proj, attention.v_proj)
        self._out_proj = prepacked.packed_linear(as_linear(attention.out_proj))
        self._up_proj = prepacked.packed_linear(feed_forward.up_proj)
        self._down_proj = prepacked.packed_linear(feed_forward.down_proj)
        self._activation, self._scale = feed_forward.activation, attention.scale
        self._head_config = attention.head_config

    def __call__(self, x: Tensor, mask: Tensor | None) -> Tensor:
        inputs = self._attention_norm(x) if self._is_pre_norm else x
        x = self._out_proj(self._attend(inputs, mask)).view_as(x).add_(x)
        x = x if self._is_pre_norm else self._attention_norm(x)
        inputs = self._feed_forward_norm(x) if self._is_pre_norm else x
        hidden = self._up_proj.forward_activated(inputs.flatten(0, 1), self._activation)
        x = self._down_proj(hidden).view_as(x).add_(x)
        return x if self._is_pre_norm else self._feed_forward_norm(x)

    def _attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Compute the concatenated head outputs, with shape (batch · position, n_heads · d_value)."""
        config = self._head_config
        widths = [config.n_heads * config.d_head, config.n_kv_heads * config.d_head, config.n_kv_heads * config.d_value]
        head_counts = (config.n_heads, config.n_kv_heads, config.n_kv_heads)
        parts = zip(self._qkv_proj(x.flatten(0, 1)).split(widths, 1), head_counts, strict=True)
        queries, keys, values = (part.view(*x.shape[:2], n, -1).transpose(1, 2) for part, n in parts)
        is_grouped = config.n_heads != config.n_kv_heads
        heads = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=self._scale, enable_gqa=is_grouped
        )
        return heads.transpose(1, 2).flatten(0, 1).flatten(1)
