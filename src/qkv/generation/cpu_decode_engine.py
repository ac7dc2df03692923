"""One more token through a decoder, in as few calls as it takes: GPT, or the writing half of an encoder–decoder.

`GPT.forward` and `Seq2Seq.decode` say what is computed, and this agrees with them to rounding. On a CPU the step of a
small model is so short that calls between its parts (taps, look-ups, masks, views) count for most of it: here a layer
is a dozen calls of torch. `supports_cpu_decode_engine` is the rule for who goes this way; all others go the model's own road.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.choices import HeadLayout, AttentionKernel, NormPosition
from qkv.generation.decode_buffers import BufferedNorm, DecodeBuffers, Rotation
from qkv.generation.prepacked_weights import PrepackedWeights
from qkv.models import GPT, Seq2Seq
from qkv.nn import (
    AtEnds,
    Attention,
    Block,
    ConcatenatedPositions,
    FeedForward,
    Int8Linear,
    KVCache,
    Mask,
    RMSNorm,
    Rotary,
    Source,
    SourceCache,
    activate,
    is_looked_at,
)


@dataclass(slots=True)
class _Here:
    """What one step tells all its layers."""

    room: DecodeBuffers
    keys: Sequence[Tensor]
    """Of each layer, all that may be seen: (batch · kv_head, d_head, key)."""
    values: Sequence[Tensor]
    """(batch · kv_head, key, d_value)."""
    slots: Sequence[tuple[Tensor, Tensor]]
    """Of each layer, where the new keys and values go."""
    ends: AtEnds | None
    """In rows of different lengths: where in `slots`, which then are the whole cache."""
    rotation: Rotation | None
    mask: Tensor | None
    """Added to the scores: (batch · kv_head or 1, heads that share keys or 1, key)."""


class CPUDecodeEngine:
    """A step by prepared weights, for one call of `generate` or `translate`; made by `create_cpu_decode_engine`."""

    def __init__(self, model: GPT | Seq2Seq, packing: PrepackedWeights, *, capacity: int) -> None:
        side = model.decoder if isinstance(model, Seq2Seq) else model
        embedding = side.embedding
        blocks = [block for block in side.blocks if isinstance(block, Block)]
        self._tokens, self._scale = embedding.token.weight.detach(), embedding.scale
        self._embedding_norm = None if embedding.norm is None else BufferedNorm(embedding.norm)
        self._final_norm = None if isinstance(side.final_norm, nn.Identity) else BufferedNorm(side.final_norm)
        self._blocks = [_LeanBlock(block, packing) for block in blocks]
        self._unembed, self._logit_scale = packing.product(model.unembedding), model.unembedding.scale
        self._window, self._relation, self._capacity = model.config.sliding_window, side.relation, capacity
        self._shape = blocks[0].attention.head_config
        norm = blocks[0].attention_norm
        self._epsilon = norm.epsilon if isinstance(norm, RMSNorm) else None
        self._room: DecodeBuffers | None = None
        self._places = self._angles = self._bias = None
        places = torch.arange(capacity)[None]
        if embedding.position is not None:
            nothing = self._tokens.new_zeros(1, capacity, self._tokens.shape[1])
            self._places = embedding.position(nothing, places)[0]
        if side.relation is not None:
            related = side.relation(places if isinstance(side.relation, Rotary) else places[:, -1:], places)
            self._angles, self._bias = related.rotation, related.bias

    def __call__(self, ids: Tensor, cache: KVCache, source: Source | None = None) -> Tensor:
        positions = cache.reserve(batch=len(ids), n_new=1)
        room = self._room_for(len(ids))
        here = self._ragged(cache, positions, room) if cache.is_ragged else self._even(cache, room)
        x = self._embed(ids, positions[:, 0] if cache.is_ragged else cache.n_filled - 1, room)
        visible = None if source is None or source.mask is None else source.mask.table
        for number, block in enumerate(self._blocks):
            x = block.look_back(x, here, number)
            if source is not None:
                x = block.look_at_source(x, room, cache.sources[number], states=source.states, visible=visible)
            x = block.think(x, room)
        if self._final_norm is not None:
            x = self._final_norm(x, room)
        return self._unembed(x if self._logit_scale == 1.0 else x * self._logit_scale)

    def _room_for(self, rows: int) -> DecodeBuffers:
        if self._room is None or self._room.rows != rows:
            self._room = DecodeBuffers(
                self._tokens, self._shape, rows=rows, epsilon=self._epsilon, is_rotary=self._angles is not None
            )
        return self._room

    def _embed(self, ids: Tensor, positions: Tensor | int, room: DecodeBuffers) -> Tensor:
        x = room.stream
        torch.index_select(self._tokens, 0, ids, out=x) if x.is_contiguous() else x.copy_(self._tokens[ids])
        if self._scale != 1.0:
            x.mul_(self._scale)
        if self._places is not None:
            x.add_(self._places[positions])
        if self._embedding_norm is not None:
            x.copy_(self._embedding_norm(x, room))
        return x

    def _even(self, cache: KVCache, room: DecodeBuffers) -> _Here:
        """All rows are equally long: what may be seen stands side by side in the cache, and no mask is needed."""
        n = cache.n_filled
        first = 0 if self._window is None else max(0, n - self._window)
        new = (part.select(3, n - 1) for part in (cache.keys, cache.values))
        angles = None if self._angles is None else [part[0, 0, n - 1] for part in self._angles]
        return _Here(
            room=room,
            keys=cache.keys.flatten(1, 2).narrow(2, first, n - first).transpose(2, 3).unbind(0),
            values=cache.values.flatten(1, 2).narrow(2, first, n - first).unbind(0),
            slots=list(zip(*(part.unbind(0) for part in new), strict=True)),
            ends=None,
            rotation=None if angles is None else (angles[0], _half(angles[1])),
            # A bias goes by distance alone: this is the end of the row of the last query there could be.
            mask=None if self._bias is None else self._folded(self._bias[..., self._capacity - n + first :], room.rows),
        )

    def _ragged(self, cache: KVCache, positions: Tensor, room: DecodeBuffers) -> _Here:
        n = cache.n_filled
        visible = Mask(causal=True, window=self._window, query_positions=positions).visible(1, n, positions.device)
        bias, rotation = torch.zeros((), dtype=self._tokens.dtype), None
        if self._relation is not None:
            related = self._relation(positions, torch.arange(n)[None])
            bias = bias if related.bias is None else related.bias
            angles = None if related.rotation is None else [part[:, 0] for part in related.rotation]
            rotation = None if angles is None else (angles[0], _half(angles[1]))
        keys, values = cache.keys.unbind(0), cache.values.unbind(0)
        assert isinstance(cache.place, AtEnds)
        return _Here(
            room=room,
            keys=[part[:, :, :n].flatten(0, 1).transpose(1, 2) for part in keys],
            values=[part[:, :, :n].flatten(0, 1) for part in values],
            slots=list(zip(keys, values, strict=True)),
            ends=cache.place,
            rotation=rotation,
            mask=self._folded(torch.where(visible, bias, float("-inf")), room.rows),
        )

    def _folded(self, mask: Tensor, rows: int) -> Tensor:
        """(batch, head, 1, key) as `_Here.mask` has it."""
        if mask.shape[1] > 1:
            mask = mask.reshape(mask.shape[0], self._shape.n_kv_heads, -1, mask.shape[3])
        return mask.expand(rows, self._shape.n_kv_heads, -1, -1).flatten(0, 1)


class _LeanBlock:
    def __init__(self, block: Block, packing: PrepackedWeights) -> None:
        attention, cross, feed_forward = block.attention, block.cross_attention, block.feed_forward
        self._is_pre = block.norm_position is NormPosition.PRE
        self._attention_norm, self._feed_forward_norm = (
            BufferedNorm(block.attention_norm),
            BufferedNorm(block.feed_forward_norm),
        )
        self._own = packing.product(attention.q_proj, attention.k_proj, attention.v_proj, first=attention.scale)
        self._output = packing.product(linear(attention.out_proj))
        if cross is not None:
            self._cross_attention_norm = BufferedNorm(block.cross_attention_norm)
            self._query, self._key, self._value = (
                packing.product(part) for part in (cross.q_proj, cross.k_proj, cross.v_proj)
            )
            self._cross_output = packing.product(linear(cross.out_proj))
        gate = feed_forward.gate_proj
        self._expand = (
            packing.product(feed_forward.up_proj) if gate is None else packing.product(gate, feed_forward.up_proj)
        )
        self._contract = packing.product(feed_forward.down_proj)
        self._is_gated, self._activation = gate is not None, feed_forward.activation
        self._shape, self._scale = attention.head_config, attention.scale

    def look_back(self, x: Tensor, here: _Here, number: int) -> Tensor:
        room = here.room
        self._own.into(self._attention_norm(x, room) if self._is_pre else x, room.projected)
        if here.rotation is not None:
            room.turn(here.rotation)
        keys, values = here.slots[number]
        if here.ends is None:
            keys.copy_(room.keys)
            values.copy_(room.values)
        else:
            here.ends.write(keys, room.keys[:, :, None])
            here.ends.write(values, room.values[:, :, None])
        # Two products and a softmax: for one query a head torch's fused kernel takes half as long again.
        asked, keys = room.asked(), here.keys[number]
        scores = torch.bmm(asked, keys) if here.mask is None else torch.baddbmm(here.mask, asked, keys)
        torch.bmm(torch.softmax(scores, -1, out=scores), here.values[number], out=room.found)
        self._output.onto(x, room.heads)
        return x if self._is_pre else self._attention_norm(x, room)

    def look_at_source(
        self, x: Tensor, room: DecodeBuffers, cache: SourceCache, *, states: Tensor, visible: Tensor | None
    ) -> Tensor:
        rows, shape = x.shape[0], self._shape
        queries = self._query(self._cross_attention_norm(x, room) if self._is_pre else x)
        keys, values = cache.fetch(lambda: (self._of_source(self._key, states), self._of_source(self._value, states)))
        # The rows of a text are queries of its one source.
        n_texts = len(keys)
        queries = queries.view(n_texts, rows // n_texts, shape.n_heads, shape.d_head).transpose(1, 2)
        mask = None if visible is None else visible.expand(-1, -1, rows // n_texts, -1)
        is_grouped = shape.n_heads != shape.n_kv_heads
        heads = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=self._scale, enable_gqa=is_grouped
        )
        self._cross_output.onto(x, heads.transpose(1, 2).reshape(rows, -1))
        return x if self._is_pre else self._cross_attention_norm(x, room)

    def think(self, x: Tensor, room: DecodeBuffers) -> Tensor:
        given = self._feed_forward_norm(x, room) if self._is_pre else x
        if not self._is_gated:
            hidden = self._expand.activated(given, self._activation)
        else:
            gate, hidden = self._expand(given).chunk(2, -1)
            hidden = activate(gate, self._activation).mul_(hidden)
        self._contract.onto(x, hidden)
        return x if self._is_pre else self._feed_forward_norm(x, room)

    def _of_source(self, product: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
        projected = product(states.flatten(0, 1)).unflatten(0, states.shape[:2])
        return projected.unflatten(-1, (self._shape.n_kv_heads, -1)).transpose(1, 2)


def create_cpu_decode_engine(
    model: GPT | Seq2Seq, packing: PrepackedWeights, *, capacity: int
) -> CPUDecodeEngine | None:
    """None where the model goes its own road."""
    return CPUDecodeEngine(model, packing, capacity=capacity) if supports_cpu_decode_engine(model, packing) else None


def supports_cpu_decode_engine(model: GPT | Seq2Seq, packing: PrepackedWeights) -> bool:
    """Float32 on a CPU, not in training, heads split, with an output projection, positions not concatenated, and no
    one looks inside (a tap, a hook, the plain kernel).
    """
    side = model.decoder if isinstance(model, Seq2Seq) else model
    is_concatenated = isinstance(side.embedding.position, ConcatenatedPositions)
    return not model.training and not is_concatenated and has_supported_modules([side, model.unembedding], packing)


def has_supported_modules(parts: Sequence[nn.Module], packing: PrepackedWeights) -> bool:
    """What `supports_cpu_decode_engine` asks of weights, attentions and taps."""
    looked_at = [module for part in parts for module in part.modules()]
    attentions = [part for part in looked_at if isinstance(part, Attention)]
    feed_forwards = [part for part in looked_at if isinstance(part, FeedForward)]
    linears = [one for part in attentions for one in (part.q_proj, part.k_proj, part.v_proj, part.out_proj)]
    linears += [one for part in feed_forwards for one in (part.up_proj, part.down_proj, part.gate_proj or part.up_proj)]
    return (
        packing.is_possible
        and not any(is_looked_at(part) for part in looked_at)
        and all(
            part.head_config.layout is HeadLayout.SPLIT and part.kernel is AttentionKernel.FUSED for part in attentions
        )
        and all(type(one) in (nn.Linear, Int8Linear) for one in linears)
    )


def _half(angles: Tensor) -> Tensor:
    return angles[..., : angles.shape[-1] // 2]


def linear(part: nn.Module) -> nn.Linear | Int8Linear:
    """Of a part that `has_supported_modules` has found to be one."""
    assert isinstance(part, nn.Linear | Int8Linear)
    return part
