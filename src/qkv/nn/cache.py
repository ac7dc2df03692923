"""Key/value cache for incremental decoding.

The cache is preallocated and filled from the left, so slot j of a row contains the row's token at position j. Rows may
have different lengths. Padding tokens are never written to the cache.
"""

from collections.abc import Callable
from dataclasses import dataclass
from weakref import proxy

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkv.errors import KVCacheError
from qkv.tensors import AttentionMask, Keys, Positions, Values
from qkv.utils import can_read_values


@dataclass(frozen=True)
class EqualLengthSlots:
    """Destination slots for rows of equal length, which are all extended at the same slots."""

    slots: slice

    def write(self, cached: Tensor, new: Tensor) -> None:
        cached[:, :, self.slots] = new


@dataclass(frozen=True)
class NonPaddingTokenSlots:
    """Destination slots for a batch with padding. Token (rows[i], columns[i]) is written to slots[i] of its row."""

    rows: Int[Tensor, " token"]
    columns: Int[Tensor, " token"]
    slots: Int[Tensor, " token"]

    def write(self, cached: Tensor, new: Tensor) -> None:
        # An index, a slice and an index select a tensor of shape (token, kv_head, width).
        cached[self.rows, :, self.slots] = new[self.rows, :, self.columns]


@dataclass(frozen=True)
class RaggedAppendSlots:
    """Destination slots for rows of different lengths without padding. Each row is extended at its own end."""

    slots: Int[Tensor, "batch 1 new 1"]

    def write(self, cached: Tensor, new: Tensor) -> None:
        cached.scatter_(2, self.slots.expand_as(new), new)


class LayerCache:
    """Cached keys and values of one layer, with shape (batch, kv_head, slot, width)."""

    def __init__(self, parent: "KVCache", layer: int) -> None:
        self._parent = parent
        self._layer = layer

    @property
    def keys(self) -> Keys:
        return self._parent.keys[self._layer]

    @property
    def values(self) -> Values:
        return self._parent.values[self._layer]

    def append(
        self, keys: Float[Tensor, "batch kv_head new d_head"], values: Float[Tensor, "batch kv_head new d_value"]
    ) -> tuple[Keys, Values]:
        """Write new keys and values to the slots reserved by `KVCache.reserve` and return all filled slots."""
        slots, n = self._parent.slots, self._parent.n_filled
        if slots is None:
            raise KVCacheError("no cache slots are reserved; call KVCache.reserve once per forward pass")
        for name, cached, new in (("keys", self.keys, keys), ("values", self.values, values)):
            # Without this check, a single head would silently be broadcast to all heads of the cache.
            expected, got = (cached.shape[1], cached.shape[3]), (new.shape[1], new.shape[3])
            if expected != got:
                raise KVCacheError(f"the cache holds {name} of (heads, width) {expected}, but the layer produced {got}")
            slots.write(cached, new)
        return self.keys[:, :, :n], self.values[:, :, :n]

    @property
    def query_positions(self) -> Positions | None:
        return self._parent.positions


class LayerSourceCache:
    """Cached cross-attention keys and values of one layer, computed once per source and shared by its beams."""

    def __init__(self, parent: "KVCache | None" = None) -> None:
        # A weak reference avoids a reference cycle, which would keep the cache alive until the next garbage collection.
        self._parent = None if parent is None else proxy(parent)
        self.keys_values: tuple[Keys, Values] | None = None

    @property
    def query_positions(self) -> Positions | None:
        """Positions of the target tokens that attend to the source in the current forward pass."""
        return None if self._parent is None else self._parent.positions

    def get_or_compute(self, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Keys, Values]:
        """Return the cached keys and values. The first call computes them with `compute`."""
        if self.keys_values is None:
            self.keys_values = compute()
        return self.keys_values

    def reorder(self, sources: Int[Tensor, " source"]) -> None:
        """Keep only the given sources, in the given order."""
        if self.keys_values is not None:
            keys, values = self.keys_values
            self.keys_values = keys.index_select(0, sources), values.index_select(0, sources)


class KVCache:
    """Key/value cache for all layers of a decoder.

    Models take the cache as an argument and do not store it.
    """

    def __init__(
        self,
        *,
        n_layers: int,
        batch: int,
        capacity: int,
        key_shape: tuple[int, int],
        value_shape: tuple[int, int],
        like: Tensor,
        growth_step: int | None = None,
    ) -> None:
        """Allocate a cache for `capacity` tokens per row.

        `key_shape` and `value_shape` are (n_kv_heads, width). `like` determines the dtype and device. If `growth_step`
        is set, memory is allocated on demand, at least `growth_step` tokens per row at a time. Otherwise, the entire
        capacity is allocated immediately.
        """
        if min(batch, capacity) < 1:
            raise KVCacheError(f"batch and capacity must be at least 1, got batch={batch} and capacity={capacity}")
        self.capacity = capacity
        self.lengths = torch.zeros(batch, dtype=torch.long, device=like.device)
        self.n_filled = 0
        """Number of slots in use in the longest row."""
        self.is_ragged = False
        """Whether rows have different lengths."""
        self.positions: Positions | None = None
        """Position ids of the tokens of the current forward pass."""
        self.slots: EqualLengthSlots | RaggedAppendSlots | NonPaddingTokenSlots | None = None
        """Slots to which the layers write the tokens of the current forward pass."""
        self._growth_step = growth_step
        n_allocated = capacity if growth_step is None else min(growth_step, capacity)
        # A single tensor for all layers lets a decode step create all views with one operation.
        self.keys = like.new_zeros(n_layers, batch, key_shape[0], n_allocated, key_shape[1])
        """Keys of all layers, with shape (layer, batch, kv_head, slot, d_head)."""
        self.values = like.new_zeros(n_layers, batch, value_shape[0], n_allocated, value_shape[1])
        """Values of all layers, with shape (layer, batch, kv_head, slot, d_value)."""
        self.sources = [LayerSourceCache(self) for _ in range(n_layers)]
        self._source_states: Tensor | None = None

    @property
    def layers(self) -> list[LayerCache]:
        """One view per layer. Views are created on demand because storing them would create a reference cycle."""
        return [LayerCache(self, layer) for layer in range(self.keys.shape[0])]

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    @property
    def n_bytes(self) -> int:
        """Number of bytes allocated for keys and values, including unfilled slots and cross-attention."""
        source_tensors = [tensor for source in self.sources if source.keys_values for tensor in source.keys_values]
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.keys, self.values, *source_tensors))

    def reset(self) -> None:
        """Empty the cache for new sequences without freeing its memory."""
        self.lengths = torch.zeros_like(self.lengths)
        self.n_filled, self.is_ragged = 0, False
        self.positions = self.slots = self._source_states = None
        for source in self.sources:
            source.keys_values = None

    def reserve(self, *, batch: int, n_new: int, attention_mask: AttentionMask | None = None) -> Positions:
        """Reserve slots for a forward pass over `n_new` tokens per row and return their position ids."""
        if batch != self.batch:
            raise KVCacheError(f"the cache was created for batch={self.batch}, but the ids have batch={batch}")
        is_ragged = self.is_ragged or (attention_mask is not None and not bool(attention_mask.all()))
        # The number of tokens that each row grows by: the same number for all rows, or one number per row.
        n_added = n_new if attention_mask is None else attention_mask.sum(1)
        if attention_mask is None or not is_ragged:
            # The longest row grows by n_new as well. Its length is not read, because reading would wait for a GPU.
            n_needed = self.n_filled + n_new
        else:
            n_needed = int((self.lengths + n_added).max())
        if n_needed > self.capacity:
            raise KVCacheError(f"the cache has a capacity of {self.capacity} tokens per row, but {n_needed} are needed")
        if n_needed > self.keys.shape[3]:
            self._grow(n_needed)
        self.is_ragged = is_ragged
        self.positions = positions = self._assign_slots(n_new, attention_mask)
        self.lengths = self.lengths + n_added
        self.n_filled = n_needed
        return positions

    def _grow(self, n_needed: int) -> None:
        """Allocate more slots. The number grows by at least half so that the total cost of copying stays linear."""
        assert self._growth_step is not None
        n_old = self.keys.shape[3]
        n_more = min(max(n_needed - n_old, self._growth_step, n_old // 2), self.capacity - n_old)
        # New slots must be zero. A mask would not hide NaN in uninitialized memory because 0 · NaN is NaN.
        self.keys, self.values = (
            torch.cat((cached, cached.new_zeros(*cached.shape[:3], n_more, cached.shape[4])), dim=3)
            for cached in (self.keys, self.values)
        )

    def _assign_slots(self, n_new: int, attention_mask: AttentionMask | None) -> Positions:
        """Set `self.slots` for the new tokens and return their position ids."""
        if not self.is_ragged:
            self.slots = EqualLengthSlots(slice(self.n_filled, self.n_filled + n_new))
            return torch.arange(self.n_filled, self.n_filled + n_new, device=self.lengths.device)[None]
        if attention_mask is None:
            positions = self.lengths[:, None]
            if n_new > 1:
                positions = positions + torch.arange(n_new, device=self.lengths.device)
            self.slots = RaggedAppendSlots(positions[:, None, :, None])
            return positions
        positions = self.lengths[:, None] + (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        rows, columns = attention_mask.nonzero(as_tuple=True)
        self.slots = NonPaddingTokenSlots(rows, columns, positions[rows, columns])
        return positions

    def check_and_store_source(self, states: Float[Tensor, "source key d_model"]) -> None:
        """Raise `KVCacheError` if the cross-attention cache was filled from a source other than `states`.

        Stores `states` for the next check. Values are compared only where the host can read them.
        """
        cached, previous = self.sources[0].keys_values, self._source_states
        if cached is not None:
            is_other = (cached[0].shape[0], cached[0].shape[2]) != tuple(states.shape[:2])
            # If sources were dropped from the cached keys, `previous` has another shape and cannot be compared.
            if previous is not None and previous is not states and previous.shape == states.shape:
                is_other = is_other or (can_read_values(states) and not torch.equal(previous, states))
            if is_other:
                shapes = f"{cached[0].shape[0]} × {cached[0].shape[2]}, now {states.shape[0]} × {states.shape[1]}"
                raise KVCacheError(f"the cache was filled from a different source (then of shape {shapes})")
        self._source_states = states

    def reorder(
        self, rows: Int[Tensor, " row"], *, sources: Int[Tensor, " source"] | None = None, common_prefix: int = 0
    ) -> None:
        """Replace each row i of the cache with row rows[i] for beam search. Rows may be repeated or dropped.

        The beams of a source share its cross-attention cache, which is not reordered with them. `sources` selects the
        sources to keep (default: all). The caller guarantees that reordering does not change the first
        `common_prefix` positions of any row, so they are not copied unless the number of rows changes.
        """
        if sources is not None:
            for source in self.sources:
                source.reorder(sources)
            self._source_states = None
        changed = slice(common_prefix, self.n_filled)
        if len(rows) != self.batch:
            self.keys = self.keys.index_select(1, rows)
            self.values = self.values.index_select(1, rows)
        elif common_prefix < self.n_filled:
            # Copying one layer at a time keeps the temporary copy small.
            for layer in self.layers:
                for cached in (layer.keys, layer.values):
                    cached[:, :, changed] = cached[:, :, changed].index_select(0, rows)
        self.lengths = self.lengths.index_select(0, rows)
        if self.is_ragged and len(rows):
            self.n_filled = int(self.lengths.max())
