"""One more token through the writing half of an encoder–decoder, in as few calls as it takes.

`Seq2Seq.decode` says what is computed, and this agrees with it to rounding. On a CPU the step of a small model is so
short that calls between its parts (taps, look-ups, masks) count: without them it takes 0.7 times as long.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.choices import HeadLayout, Kernel, NormPosition
from qkv.generation.packing import Packing
from qkv.models import Seq2Seq
from qkv.nn import (
    Attention,
    Block,
    ConcatenatedPositions,
    FeedForward,
    KVCache,
    LayerCache,
    Source,
    SourceCache,
    Tap,
    activate,
)


class LeanStep:
    """A step by prepared weights; asked for one call of `translate` after `can_be_lean`."""

    def __init__(self, model: Seq2Seq, packing: Packing, *, capacity: int) -> None:
        side = model.decoder
        embedding = side.embedding
        self._tokens, self._scale = embedding.token.weight.detach(), embedding.scale
        self._embedding_norm = None if embedding.norm is None else embedding.norm.forward
        self._final_norm = side.final_norm.forward
        self._places = None
        if embedding.position is not None:
            nothing = self._tokens.new_zeros(1, capacity, self._tokens.shape[1])
            self._places = embedding.position(nothing, torch.arange(capacity)[None])[0]
        self._blocks = [_LeanBlock(block, packing) for block in side.blocks if isinstance(block, Block)]
        self._unembed, self._logit_scale = packing.product(model.unembedding), model.unembedding.scale

    def __call__(self, ids: Tensor, source: Source, cache: KVCache) -> Tensor:
        cache.reserve(batch=len(ids), n_new=1)
        n = cache.n_filled
        x = F.embedding(ids[:, None], self._tokens) * self._scale
        if self._places is not None:
            x = x + self._places[n - 1]
        if self._embedding_norm is not None:
            x = self._embedding_norm(x)
        visible = None if source.mask is None else source.mask.table
        for block, own, of_source in zip(self._blocks, cache.layers, cache.sources, strict=True):
            x = block.look_back(x, own, n)
            x = block.look_at_source(x, of_source, source.states, visible)
            x = block.think(x)
        return self._unembed(self._final_norm(x) * self._logit_scale)[:, 0]


class _LeanBlock:
    def __init__(self, block: Block, packing: Packing) -> None:
        attention, cross, feedforward = block.attention, block.cross, block.feedforward
        assert isinstance(cross, Attention)
        outputs = [part.output for part in (attention, cross) if isinstance(part.output, nn.Linear)]
        self._pre = block.norm_position is NormPosition.PRE
        self._norms = [part.forward for part in (block.attention_norm, block.cross_norm, block.feedforward_norm)]
        self._own = packing.product(attention.query, attention.key, attention.value)
        self._outputs = [packing.product(output) for output in outputs]
        self._query, self._key, self._value = (packing.product(part) for part in (cross.query, cross.key, cross.value))
        gate = feedforward.gate
        self._expand = (
            packing.product(feedforward.expand) if gate is None else packing.product(gate, feedforward.expand)
        )
        self._contract = packing.product(feedforward.contract)
        self._is_gated, self._activation = gate is not None, feedforward.activation
        self._shape, self._scale = attention.shape, attention.scale
        shape = attention.shape
        self._widths = [shape.n_heads * shape.d_head, shape.n_kv_heads * shape.d_head, shape.n_kv_heads * shape.d_value]
        self._is_grouped = shape.n_heads != shape.n_kv_heads

    def look_back(self, x: Tensor, cache: LayerCache, n: int) -> Tensor:
        rows, shape = x.shape[0], self._shape
        queries, keys, values = self._own(self._norms[0](x) if self._pre else x).split(self._widths, -1)
        cache.keys[:, :, n - 1] = keys.view(rows, shape.n_kv_heads, shape.d_head)
        cache.values[:, :, n - 1] = values.view(rows, shape.n_kv_heads, shape.d_value)
        queries = queries.view(rows, shape.n_heads, 1, shape.d_head)
        heads = self._attend(queries, cache.keys[:, :, :n], cache.values[:, :, :n], None)
        return self._add(0, x, self._outputs[0](heads.reshape(rows, 1, -1)))

    def look_at_source(self, x: Tensor, cache: SourceCache, states: Tensor, visible: Tensor | None) -> Tensor:
        rows, shape = x.shape[0], self._shape
        queries = self._query(self._norms[1](x) if self._pre else x)
        keys, values = cache.fetch(lambda: (self._split(self._key(states)), self._split(self._value(states))))
        # The rows of a text are queries of its one source.
        n_texts = len(keys)
        queries = queries.view(n_texts, rows // n_texts, shape.n_heads, shape.d_head).transpose(1, 2)
        mask = None if visible is None else visible.expand(-1, -1, rows // n_texts, -1)
        heads = self._attend(queries, keys, values, mask).transpose(1, 2)
        return self._add(1, x, self._outputs[1](heads.reshape(rows, 1, -1)))

    def think(self, x: Tensor) -> Tensor:
        hidden = self._expand(self._norms[2](x) if self._pre else x)
        if self._is_gated:
            gate, hidden = hidden.chunk(2, -1)
            hidden = activate(gate, self._activation) * hidden
        else:
            hidden = activate(hidden, self._activation)
        return self._add(2, x, self._contract(hidden))

    def _add(self, part: int, x: Tensor, write: Tensor) -> Tensor:
        x = x + write
        return x if self._pre else self._norms[part](x)

    def _split(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (self._shape.n_kv_heads, -1)).transpose(1, 2)

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=self._scale, enable_gqa=self._is_grouped
        )


def can_be_lean(model: Seq2Seq, packing: Packing) -> bool:
    """Whether the model is of the usual shape, and no one looks inside."""
    side, looked_at = model.decoder, [*model.decoder.modules(), *model.unembedding.modules()]
    is_usual = side.relation is None and not isinstance(side.embedding.position, ConcatenatedPositions)
    is_free = not any(_is_in_use(part) for part in looked_at)
    attentions = [part for part in looked_at if isinstance(part, Attention)]
    feedforwards = [part for part in looked_at if isinstance(part, FeedForward)]
    linears = [one for part in attentions for one in (part.query, part.key, part.value, part.output)]
    linears += [one for part in feedforwards for one in (part.expand, part.contract, part.gate or part.expand)]
    return (
        packing.is_possible
        and not model.training
        and model.config.window is None
        and is_usual
        and is_free
        and all(part.shape.layout is HeadLayout.SPLIT and part.kernel is Kernel.FUSED for part in attentions)
        and all(type(one) is nn.Linear for one in linears)
    )


def _is_in_use(part: nn.Module) -> bool:
    if isinstance(part, Tap):
        return part.is_in_use
    return bool(part._forward_hooks or part._forward_pre_hooks)  # noqa: SLF001 - torch has no other way to ask
