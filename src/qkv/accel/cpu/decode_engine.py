"""Decode engine for CPUs, for a GPT or the decoder of an encoder–decoder.

The results match those of the reference implementations `GPT.forward` and `Seq2Seq.decode` up to rounding. A decode
step of a small model is so short that Python overhead (taps, dispatch, masks, views) dominates its time. The engine
therefore executes a layer in about a dozen torch calls. `CPUBackend.supports` returns which models are supported.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.accel.cpu.decode_buffers import BufferedNorm, DecodeBuffers, RotaryAngles
from qkv.accel.cpu.prepacked_weights import PrepackedWeights
from qkv.accel.int8 import Int8Linear
from qkv.choices import NormPosition
from qkv.generation.decode_engine import (
    GPTDecodeEngine,
    RowIds,
    Seq2SeqDecodeEngine,
    SequenceIndices,
    TokenLists,
    right_pad_sequences,
)
from qkv.generation.sampling import NextLogits
from qkv.models import GPT, Seq2Seq
from qkv.nn import Block, KVCache, Mask, Source
from qkv.nn.block import activate
from qkv.nn.cache import LayerSourceCache, RaggedAppendSlots
from qkv.nn.norm import RMSNorm
from qkv.nn.positions import RotaryEmbedding


@dataclass(slots=True)
class _StepState:
    """Inputs to a decode step that all layers share."""

    buffers: DecodeBuffers
    keys: Sequence[Tensor]
    """Visible keys in each layer, with shape (batch · kv_head, d_head, key)."""
    values: Sequence[Tensor]
    """Visible values in each layer, with shape (batch · kv_head, key, d_value)."""
    slots: Sequence[tuple[Tensor, Tensor]]
    """Destination for the new keys and values in each layer."""
    append_slots: RaggedAppendSlots | None
    """Positions to write to if rows have different lengths, in which case `slots` contains the full cache."""
    angles: RotaryAngles | None
    mask: Tensor | None
    """Additive mask for the scores, with shape (batch · kv_head or 1, heads per kv_head or 1, key)."""


class CPUDecodeEngine:
    """Engine that processes prompts with the reference model and decodes tokens with prepacked weights."""

    def __init__(
        self, model: GPT | Seq2Seq, eager: GPTDecodeEngine | Seq2SeqDecodeEngine, prepacked: PrepackedWeights
    ) -> None:
        self._eager = eager
        self._step = CPUDecodeStep(model, prepacked, capacity=eager.cache.capacity)

    def prefill(self, prompts: TokenLists, *, sources: TokenLists | None = None) -> NextLogits:
        is_start_token = all(len(prompt) == 1 for prompt in prompts)
        if isinstance(self._eager, GPTDecodeEngine) or sources is None or not is_start_token:
            return self._eager.prefill(prompts, sources=sources)
        # The only token of each prompt is the start token, which is a decode step.
        start_ids, _ = right_pad_sequences(prompts, torch.device("cpu"), len(self._step.token_embedding))
        self._eager.encode(sources)
        return self.decode(start_ids[:, 0])

    def decode(self, ids: RowIds) -> NextLogits:
        source = self._eager.source if isinstance(self._eager, Seq2SeqDecodeEngine) else None
        return self._step(ids, self._eager.cache, source)

    def reorder(self, rows: RowIds, *, sequences: SequenceIndices | None = None, common_prefix: int = 0) -> None:
        self._eager.reorder(rows, sequences=sequences, common_prefix=common_prefix)

    def close(self) -> None:
        self._eager.close()


class CPUDecodeStep:
    """A decode step with prepacked weights, which appends one token per row to the cache."""

    def __init__(self, model: GPT | Seq2Seq, prepacked: PrepackedWeights, *, capacity: int) -> None:
        decoder = model.decoder if isinstance(model, Seq2Seq) else model
        embedding = decoder.embedding
        blocks = [block for block in decoder.blocks if isinstance(block, Block)]
        self.token_embedding, self._embedding_scale = embedding.token.weight.detach(), embedding.scale
        self._embedding_norm = None if embedding.norm is None else BufferedNorm(embedding.norm)
        self._final_norm = None if isinstance(decoder.final_norm, nn.Identity) else BufferedNorm(decoder.final_norm)
        self._blocks = [_DecodeBlock(block, prepacked) for block in blocks]
        self._unembedding, self._logit_scale = prepacked.packed_linear(model.unembedding), model.unembedding.scale
        self._sliding_window, self._capacity = model.config.sliding_window, capacity
        self._relative_positions = decoder.relative_positions
        self._head_config = blocks[0].attention.head_config
        norm = blocks[0].attention_norm
        self._rms_norm_eps = norm.eps if isinstance(norm, RMSNorm) else None
        self._buffers: DecodeBuffers | None = None
        # Position embeddings, rotary angles and biases are computed once for all positions.
        self._position_embedding = self._rotation = self._bias = None
        positions = torch.arange(capacity)[None]
        if embedding.position is not None:
            zeros = self.token_embedding.new_zeros(1, capacity, self.token_embedding.shape[1])
            self._position_embedding = embedding.position(zeros, positions)[0]
        if decoder.relative_positions is not None:
            # A bias depends only on the distance, so the row of the last query contains all values.
            queries = positions if isinstance(decoder.relative_positions, RotaryEmbedding) else positions[:, -1:]
            position_info = decoder.relative_positions(queries, positions)
            self._rotation, self._bias = position_info.rotation, position_info.bias

    def __call__(self, ids: Tensor, cache: KVCache, source: Source | None = None) -> Tensor:
        """Append one token per row to the cache and return the logits for the following token."""
        positions = cache.reserve(batch=len(ids), n_new=1)
        buffers = self._buffers_for(len(ids))
        state = (
            self._ragged_state(cache, positions, buffers)
            if cache.is_ragged
            else self._equal_length_step_state(cache, buffers)
        )
        x = self._embed(ids, positions[:, 0] if cache.is_ragged else cache.n_filled - 1, buffers)
        source_mask = None if source is None or source.mask is None else source.mask.dense
        for layer, block in enumerate(self._blocks):
            x = block.add_self_attention(x, state, layer)
            if source is not None:
                x = block.add_cross_attention(
                    x, buffers, cache.sources[layer], source_states=source.states, source_mask=source_mask
                )
            x = block.add_feed_forward(x, buffers)
        if self._final_norm is not None:
            x = self._final_norm(x, buffers)
        return self._unembedding(x if self._logit_scale == 1.0 else x * self._logit_scale)

    def _buffers_for(self, rows: int) -> DecodeBuffers:
        if self._buffers is None or self._buffers.rows != rows:
            self._buffers = DecodeBuffers(
                self.token_embedding,
                self._head_config,
                rows=rows,
                rms_norm_eps=self._rms_norm_eps,
                is_rotary=self._rotation is not None,
            )
        return self._buffers

    def _embed(self, ids: Tensor, positions: Tensor | int, buffers: DecodeBuffers) -> Tensor:
        x = buffers.residual
        if x.is_contiguous():
            torch.index_select(self.token_embedding, 0, ids, out=x)
        else:
            x.copy_(self.token_embedding[ids])
        if self._embedding_scale != 1.0:
            x.mul_(self._embedding_scale)
        if self._position_embedding is not None:
            x.add_(self._position_embedding[positions])
        if self._embedding_norm is not None:
            x.copy_(self._embedding_norm(x, buffers))
        return x

    def _equal_length_step_state(self, cache: KVCache, buffers: DecodeBuffers) -> _StepState:
        """Create the step state for rows of equal length.

        No mask is needed because the visible keys are a slice of the cache.
        """
        n = cache.n_filled
        first = 0 if self._sliding_window is None else max(0, n - self._sliding_window)
        new_slots = (part.select(3, n - 1) for part in (cache.keys, cache.values))
        angles = None if self._rotation is None else [part[0, 0, n - 1] for part in self._rotation]
        mask = None
        if self._bias is not None:
            # The bias depends only on the distance to the query, so these values are the end of the last query's row.
            mask = self._group_mask_by_kv_head(self._bias[..., self._capacity - n + first :], buffers.rows)
        return _StepState(
            buffers=buffers,
            keys=cache.keys.flatten(1, 2).narrow(2, first, n - first).transpose(2, 3).unbind(0),
            values=cache.values.flatten(1, 2).narrow(2, first, n - first).unbind(0),
            slots=list(zip(*(part.unbind(0) for part in new_slots), strict=True)),
            append_slots=None,
            angles=None if angles is None else (angles[0], _first_half(angles[1])),
            mask=mask,
        )

    def _ragged_state(self, cache: KVCache, positions: Tensor, buffers: DecodeBuffers) -> _StepState:
        """Create the step state for rows of different lengths, which require a mask."""
        n = cache.n_filled
        mask = Mask(causal=True, sliding_window=self._sliding_window, query_positions=positions)
        visible = mask.to_dense(1, n, positions.device)
        bias, angles = torch.zeros((), dtype=self.token_embedding.dtype), None
        if self._relative_positions is not None:
            position_info = self._relative_positions(positions, torch.arange(n)[None])
            bias = bias if position_info.bias is None else position_info.bias
            if position_info.rotation is not None:
                cos, sin = (part[:, 0] for part in position_info.rotation)
                angles = cos, _first_half(sin)
        keys, values = cache.keys.unbind(0), cache.values.unbind(0)
        assert isinstance(cache.slots, RaggedAppendSlots)
        return _StepState(
            buffers=buffers,
            keys=[part[:, :, :n].flatten(0, 1).transpose(1, 2) for part in keys],
            values=[part[:, :, :n].flatten(0, 1) for part in values],
            slots=list(zip(keys, values, strict=True)),
            append_slots=cache.slots,
            angles=angles,
            mask=self._group_mask_by_kv_head(torch.where(visible, bias, float("-inf")), buffers.rows),
        )

    def _group_mask_by_kv_head(self, mask: Tensor, rows: int) -> Tensor:
        """Reshape a mask from (batch, head, 1, key) to the shape of `_StepState.mask`."""
        n_kv_heads = self._head_config.n_kv_heads
        if mask.shape[1] > 1:
            mask = mask.reshape(mask.shape[0], n_kv_heads, -1, mask.shape[3])
        return mask.expand(rows, n_kv_heads, -1, -1).flatten(0, 1)


class _DecodeBlock:
    """Transformer block with prepacked weights, for a single new token per row."""

    def __init__(self, block: Block, prepacked: PrepackedWeights) -> None:
        attention, cross, feed_forward = block.attention, block.cross_attention, block.feed_forward
        self._is_pre_norm = block.norm_position is NormPosition.PRE
        self._attention_norm = BufferedNorm(block.attention_norm)
        self._feed_forward_norm = BufferedNorm(block.feed_forward_norm)
        # The attention scale is folded into the query projection.
        self._qkv_proj = prepacked.packed_linear(
            attention.q_proj, attention.k_proj, attention.v_proj, first_scale=attention.scale
        )
        self._out_proj = prepacked.packed_linear(as_linear(attention.out_proj))
        if cross is not None:
            self._cross_attention_norm = BufferedNorm(block.cross_attention_norm)
            self._cross_q_proj, self._cross_k_proj, self._cross_v_proj = (
                prepacked.packed_linear(projection) for projection in (cross.q_proj, cross.k_proj, cross.v_proj)
            )
            self._cross_out_proj = prepacked.packed_linear(as_linear(cross.out_proj))
        gate_proj = feed_forward.gate_proj
        self._up_proj = (
            prepacked.packed_linear(feed_forward.up_proj)
            if gate_proj is None
            else prepacked.packed_linear(gate_proj, feed_forward.up_proj)
        )
        self._down_proj = prepacked.packed_linear(feed_forward.down_proj)
        self._is_gated, self._activation = gate_proj is not None, feed_forward.activation
        self._head_config, self._scale = attention.head_config, attention.scale

    def add_self_attention(self, x: Tensor, state: _StepState, layer: int) -> Tensor:
        """Write the new keys and values to the cache, and add the attention output to `x` in place."""
        buffers = state.buffers
        self._qkv_proj.write_to(self._attention_norm(x, buffers) if self._is_pre_norm else x, buffers.projected)
        if state.angles is not None:
            buffers.apply_rotary(state.angles)
        key_slots, value_slots = state.slots[layer]
        if state.append_slots is None:
            key_slots.copy_(buffers.keys)
            value_slots.copy_(buffers.values)
        else:
            state.append_slots.write(key_slots, buffers.keys[:, :, None])
            state.append_slots.write(value_slots, buffers.values[:, :, None])
        # Use explicit matmuls and softmax because torch's fused attention takes 1.5 times as long for a single query
        # per head.
        queries, keys = buffers.grouped_queries(), state.keys[layer]
        scores = torch.bmm(queries, keys) if state.mask is None else torch.baddbmm(state.mask, queries, keys)
        torch.bmm(torch.softmax(scores, -1, out=scores), state.values[layer], out=buffers.grouped_heads)
        self._out_proj.add_to(x, buffers.heads)
        return x if self._is_pre_norm else self._attention_norm(x, buffers)

    def add_cross_attention(
        self,
        x: Tensor,
        buffers: DecodeBuffers,
        cache: LayerSourceCache,
        *,
        source_states: Tensor,
        source_mask: Tensor | None,
    ) -> Tensor:
        """Attend to the source and add the attention output to `x` in place."""
        rows, config = x.shape[0], self._head_config
        queries = self._cross_q_proj(self._cross_attention_norm(x, buffers) if self._is_pre_norm else x)
        keys, values = cache.get_or_compute(
            lambda: (
                self._project_source(self._cross_k_proj, source_states),
                self._project_source(self._cross_v_proj, source_states),
            )
        )
        # All rows (beams) of a sequence attend to the same source, so the rows are treated as queries of one batch
        # entry.
        n_sources = len(keys)
        queries = queries.view(n_sources, rows // n_sources, config.n_heads, config.d_head).transpose(1, 2)
        mask = None if source_mask is None else source_mask.expand(-1, -1, rows // n_sources, -1)
        is_grouped = config.n_heads != config.n_kv_heads
        heads = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=self._scale, enable_gqa=is_grouped
        )
        self._cross_out_proj.add_to(x, heads.transpose(1, 2).reshape(rows, -1))
        return x if self._is_pre_norm else self._cross_attention_norm(x, buffers)

    def add_feed_forward(self, x: Tensor, buffers: DecodeBuffers) -> Tensor:
        """Add the output of the feed-forward layer to `x` in place."""
        inputs = self._feed_forward_norm(x, buffers) if self._is_pre_norm else x
        if not self._is_gated:
            hidden = self._up_proj.forward_activated(inputs, self._activation)
        else:
            gate, hidden = self._up_proj(inputs).chunk(2, -1)
            hidden = activate(gate, self._activation).mul_(hidden)
        self._down_proj.add_to(x, hidden)
        return x if self._is_pre_norm else self._feed_forward_norm(x, buffers)

    def _project_source(self, projection: Callable[[Tensor], Tensor], source_states: Tensor) -> Tensor:
        projected = projection(source_states.flatten(0, 1)).unflatten(0, source_states.shape[:2])
        return projected.unflatten(-1, (self._head_config.n_kv_heads, -1)).transpose(1, 2)


def _first_half(angles: Tensor) -> Tensor:
    return angles[..., : angles.shape[-1] // 2]


def as_linear(module: nn.Module) -> nn.Linear | Int8Linear:
    """Narrow the type of a module that `CPUBackend.supports` has checked."""
    assert isinstance(module, nn.Linear | Int8Linear)
    return module
