"""Keys and values kept from one step to the next.

A cache is preallocated and filled from the left: slot j of a row holds that row's token at position j.
Rows may have different lengths; padding is never written.
"""

from collections.abc import Callable
from dataclasses import dataclass
from weakref import proxy

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkv.errors import CacheError
from qkv.tensors import IsToken, Keys, Positions, Values


@dataclass(frozen=True)
class _Scattered:
    """Where the tokens of a ragged batch go: token (rows[i], columns[i]) to slot slots[i] of its row."""

    rows: Int[Tensor, " token"]
    columns: Int[Tensor, " token"]
    slots: Int[Tensor, " token"]


@dataclass(frozen=True)
class AtEnds:
    """Where the tokens of a ragged batch go when none of them is padding: each row's at its own end."""

    slots: Int[Tensor, "batch 1 new 1"]

    def write(self, kept: Tensor, new: Tensor) -> None:
        kept.scatter_(2, self.slots.expand_as(new), new)


class LayerCache:
    """One layer's keys and values, (batch, kv_head, capacity, width)."""

    def __init__(self, parent: "KVCache", number: int) -> None:
        self._parent = parent
        self._number = number

    @property
    def keys(self) -> Keys:
        return self._parent.keys[self._number]

    @property
    def values(self) -> Values:
        return self._parent.values[self._number]

    def append(
        self, keys: Float[Tensor, "batch kv_head new d_head"], values: Float[Tensor, "batch kv_head new d_value"]
    ) -> tuple[Keys, Values]:
        """Write the new ones where `KVCache.reserve` said, and give back all that are filled."""
        all_keys, all_values = self.keys, self.values
        for name, kept, new in (("keys", all_keys, keys), ("values", all_values, values)):
            if (kept.shape[1], kept.shape[3]) != (new.shape[1], new.shape[3]):
                raise CacheError(
                    f"the cache is for {kept.shape[1]} heads of {name} of width {kept.shape[3]}, "
                    f"the layer gives {new.shape[1]} of width {new.shape[3]}"
                )
        place = self._parent.place
        match place:
            case None:
                raise CacheError("the cache has no room reserved: call KVCache.reserve once a pass")
            case slice():
                all_keys[:, :, place] = keys
                all_values[:, :, place] = values
            case AtEnds():
                place.write(all_keys, keys)
                place.write(all_values, values)
            case _Scattered():
                all_keys[place.rows, :, place.slots] = keys[place.rows, :, place.columns]
                all_values[place.rows, :, place.slots] = values[place.rows, :, place.columns]
        n = self._parent.n_filled
        return all_keys[:, :, :n], all_values[:, :, :n]

    @property
    def query_positions(self) -> Positions | None:
        return self._parent.positions


class SourceCache:
    """A cross-attention layer's keys and values: computed once a source, shared by all beams."""

    def __init__(self, parent: "KVCache | None" = None) -> None:
        # Not held: a cache is freed when its text ends, not when Python next looks for cycles.
        self._parent = None if parent is None else proxy(parent)
        self.kept: tuple[Keys, Values] | None = None

    @property
    def query_positions(self) -> Positions | None:
        return None if self._parent is None else self._parent.positions

    def fetch(self, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Keys, Values]:
        if self.kept is None:
            self.kept = compute()
        return self.kept

    def select(self, sources: Int[Tensor, " source"]) -> None:
        """Keep these sources alone, in this order."""
        if self.kept is not None:
            keys, values = self.kept
            self.kept = keys.index_select(0, sources), values.index_select(0, sources)


class KVCache:
    """The cache of a whole decoder; models take it as an argument and hold none themselves."""

    def __init__(
        self, *, n_layers: int, batch: int, capacity: int, key_shape: tuple[int, int], value_shape: tuple[int, int],
        like: Tensor, chunk: int | None = None,
    ) -> None:  # fmt: skip
        """Shapes are (kv_heads, width); `like` gives dtype and device.

        `chunk`: memory is taken as it is needed, at least so many tokens a row at a time. None: all of it now.
        """
        if min(batch, capacity) < 1:
            raise CacheError(f"a cache needs batch={batch} and capacity={capacity} of at least 1")
        self.capacity = capacity
        self.lengths = torch.zeros(batch, dtype=torch.long, device=like.device)
        self.n_filled = 0
        """Slots in use in the longest row."""
        self.is_ragged = False
        self.positions: Positions | None = None
        """Where the tokens of the latest pass stand."""
        self.place: slice | AtEnds | _Scattered | None = None
        self._chunk = chunk
        n_now = capacity if chunk is None else min(chunk, capacity)
        self.keys = like.new_zeros(n_layers, batch, key_shape[0], n_now, key_shape[1])
        """Of all layers, (layer, batch, kv_head, slot, d_head), so that a step can take its views of them at once."""
        self.values = like.new_zeros(n_layers, batch, value_shape[0], n_now, value_shape[1])
        self.sources = [SourceCache(self) for _ in range(n_layers)]
        self._source: Tensor | None = None

    @property
    def layers(self) -> list[LayerCache]:
        """Made when asked for: kept here, they would hold the cache that holds them."""
        return [LayerCache(self, number) for number in range(self.keys.shape[0])]

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    @property
    def n_bytes(self) -> int:
        """Bytes allocated for keys and values, filled or not; the source's share included."""
        kept = [tensor for source in self.sources if source.kept for tensor in source.kept]
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.keys, self.values, *kept))

    def empty(self) -> None:
        """Ready for other texts; the memory stays where it is."""
        self.lengths = torch.zeros_like(self.lengths)
        self.n_filled, self.is_ragged = 0, False
        self.positions = self.place = self._source = None
        for source in self.sources:
            source.kept = None

    def reserve(self, *, batch: int, n_new: int, attention_mask: IsToken | None = None) -> Positions:
        """Make room for a pass over n_new tokens and say at which positions they stand."""
        if batch != self.batch:
            raise CacheError(f"the cache was made for batch={self.batch}, the ids have batch={batch}")
        is_ragged = self.is_ragged or (attention_mask is not None and not bool(attention_mask.all()))
        added = n_new if attention_mask is None else attention_mask.sum(1)
        # Looking at the lengths makes a GPU wait; without padding the longest row stays the longest.
        n_needed = self.n_filled + n_new if attention_mask is None or not is_ragged else int((self.lengths + added).max())
        if n_needed > self.capacity:
            raise CacheError(f"the cache holds {self.capacity} tokens a row, {n_needed} are needed")
        if n_needed > self.keys.shape[3]:
            self._grow(n_needed)
        self.is_ragged = is_ragged
        self.positions = positions = self._positions(n_new, attention_mask)
        self.lengths = self.lengths + added
        self.n_filled = n_needed
        return positions

    def _grow(self, n_needed: int) -> None:
        """By half at least, so that a long text is not copied at every chunk."""
        assert self._chunk is not None
        n_old = self.keys.shape[3]
        n_more = min(max(n_needed - n_old, self._chunk, n_old // 2), self.capacity - n_old)
        # Behind slots that are not filled yet there may be anything but NaN, which a mask does not hide.
        self.keys, self.values = (
            torch.cat((kept, kept.new_zeros(*kept.shape[:3], n_more, kept.shape[4])), dim=3)
            for kept in (self.keys, self.values)
        )

    def _positions(self, n_new: int, attention_mask: IsToken | None) -> Positions:
        if not self.is_ragged:
            self.place = slice(self.n_filled, self.n_filled + n_new)
            return torch.arange(self.n_filled, self.n_filled + n_new, device=self.lengths.device)[None]
        if attention_mask is None:
            positions = self.lengths[:, None]
            if n_new > 1:
                positions = positions + torch.arange(n_new, device=self.lengths.device)
            self.place = AtEnds(positions[:, None, :, None])
            return positions
        positions = self.lengths[:, None] + (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        rows, columns = attention_mask.nonzero(as_tuple=True)
        self.place = _Scattered(rows, columns, positions[rows, columns])
        return positions

    def check_source(self, states: Float[Tensor, "source key d_model"]) -> None:
        """Refuse another source than the one whose keys and values are kept.

        Another tensor's numbers are compared on the CPU alone: elsewhere a look would wait for the device.
        """
        kept = self.sources[0].kept
        if kept is not None:
            filled, given = (kept[0].shape[0], kept[0].shape[2]), tuple(states.shape[:2])
            if filled != given:
                raise CacheError(
                    f"the cache was filled from a source of {filled[0]} × {filled[1]} tokens, "
                    f"it was now given one of {given[0]} × {given[1]}"
                )
            if self._is_other(states):
                raise CacheError(
                    f"the cache was filled from another source of {given[0]} × {given[1]} tokens; make a new cache"
                )
        self._source = states

    def _is_other(self, states: Tensor) -> bool:
        known = self._source
        if known is None or known is states or known.shape != states.shape:
            return False
        return states.device.type == "cpu" and not torch.compiler.is_compiling() and not torch.equal(known, states)

    def select(
        self, rows: Int[Tensor, " row"], *, sources: Int[Tensor, " source"] | None = None, n_equal: int = 0
    ) -> None:
        """Keep these rows, in this order, repeats allowed: a beam search's reordering.

        Beams of one source share its part, which is not reordered with them; `sources` says which are left, None: all.
        `n_equal`: said by one who knows: so many slots of each row hold what those of the row in its place hold.
        """
        if sources is not None:
            for source in self.sources:
                source.select(sources)
            self._source = None
        changed = slice(n_equal, self.n_filled)
        if len(rows) != self.batch:
            self.keys = self.keys.index_select(1, rows)
            self.values = self.values.index_select(1, rows)
        elif n_equal < self.n_filled:
            for layer in self.layers:
                for kept in (layer.keys, layer.values):
                    kept[:, :, changed] = kept[:, :, changed].index_select(0, rows)
        self.lengths = self.lengths.index_select(0, rows)
        if self.is_ragged and len(rows):
            self.n_filled = int(self.lengths.max())
