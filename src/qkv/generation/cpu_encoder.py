"""The states of a BERT in as few calls as it takes, by weights laid out for the CPU.

`BERT.forward` says what is computed, and this agrees with it to rounding. Queries, keys and values are one product, the
activation is part of the product before it, and no tap or look-up is called between.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from qkv.choices import NormPosition
from qkv.generation.cpu_decode_engine import has_supported_modules, linear
from qkv.generation.prepacked_weights import PrepackedWeights
from qkv.models import BERT
from qkv.models.inputs import check_length, place
from qkv.nn import Block
from qkv.tensors import Ids, IsToken, Residual


class CPUEncoder:
    """For a few batches in a row: a later change of a weight is not seen. Made by `create_cpu_encoder`."""

    def __init__(self, model: BERT, packing: PrepackedWeights) -> None:
        self._model = model
        self._blocks = [_LeanBlock(block, packing) for block in model.blocks if isinstance(block, Block)]

    def __call__(self, ids: Ids, *, segments: Ids | None = None, attention_mask: IsToken | None = None) -> Residual:
        model = self._model
        check_length(ids.shape[1], model.config.context_length)
        x = model.embedding(ids, place(ids, attention_mask=attention_mask), segments)
        mask = None if attention_mask is None else attention_mask[:, None, None].expand(-1, -1, ids.shape[1], -1)
        for block in self._blocks:
            x = block(x, mask)
        return model.final_norm(x)


class _LeanBlock:
    def __init__(self, block: Block, packing: PrepackedWeights) -> None:
        attention, feed_forward = block.attention, block.feed_forward
        self._is_pre = block.norm_position is NormPosition.PRE
        self._attention_norm, self._feed_forward_norm = block.attention_norm, block.feed_forward_norm
        self._own = packing.product(attention.q_proj, attention.k_proj, attention.v_proj)
        self._output = packing.product(linear(attention.out_proj))
        self._expand, self._contract = packing.product(feed_forward.up_proj), packing.product(feed_forward.down_proj)
        self._activation, self._shape, self._scale = feed_forward.activation, attention.head_config, attention.scale

    def __call__(self, x: Tensor, mask: Tensor | None) -> Tensor:
        given = self._attention_norm(x) if self._is_pre else x
        x = self._output(self._heads(given, mask)).view_as(x).add_(x)
        x = x if self._is_pre else self._attention_norm(x)
        given = self._feed_forward_norm(x) if self._is_pre else x
        x = self._contract(self._expand.activated(given.flatten(0, 1), self._activation)).view_as(x).add_(x)
        return x if self._is_pre else self._feed_forward_norm(x)

    def _heads(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(text · position, width)."""
        shape = self._shape
        widths = [shape.n_heads * shape.d_head, shape.n_kv_heads * shape.d_head, shape.n_kv_heads * shape.d_value]
        numbers = (shape.n_heads, shape.n_kv_heads, shape.n_kv_heads)
        parts = zip(self._own(x.flatten(0, 1)).split(widths, 1), numbers, strict=True)
        queries, keys, values = (part.view(*x.shape[:2], n, -1).transpose(1, 2) for part, n in parts)
        is_grouped = shape.n_heads != shape.n_kv_heads
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=self._scale, enable_gqa=is_grouped
        )
        return mixed.transpose(1, 2).flatten(0, 1).flatten(1)


def create_cpu_encoder(model: BERT, packing: PrepackedWeights) -> CPUEncoder | None:
    """None where the model goes its own road, as `supports_cpu_decode_engine` has it; and where gradients are wanted, where a window
    or a relation makes scores, and where a gate stands in the feed-forward.
    """
    config, parts = model.config, [model.embedding, model.blocks, model.final_norm, model.final]
    is_usual = (
        model.relation is None and config.sliding_window is None and not config.gated and not torch.is_grad_enabled()
    )
    return (
        CPUEncoder(model, packing)
        if is_usual and not model.training and has_supported_modules(parts, packing)
        else None
    )
