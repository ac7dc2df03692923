"""One layer of a Transformer, and a stack of them."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv.choices import NormPosition
from qkv.errors import CacheError, ConfigError
from qkv.nn.attention import Attention
from qkv.nn.cache import KVCache, LayerCache, SourceCache
from qkv.nn.feedforward import FeedForward
from qkv.nn.gradients import forked, trains_compiled
from qkv.nn.mask import Mask
from qkv.nn.norm import LayerNorm, RMSNorm
from qkv.nn.relation import ALiBi, Relation, RelativeBias, Rotary
from qkv.nn.tap import Tap, is_looked_at
from qkv.tensors import Positions, Residual


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a decoder reads: the encoder's last output, and which of it is padding."""

    states: Float[Tensor, "batch key d_model"]
    mask: Mask | None = None

    def select(self, rows: Int[Tensor, " row"]) -> "Source":
        """These sources alone, in this order."""
        attention_mask = None if self.mask is None else self.mask.key_padding_mask
        mask = None if attention_mask is None else Mask(key_padding_mask=attention_mask.index_select(0, rows))
        return Source(states=self.states.index_select(0, rows), mask=mask)

    def written_out(self) -> "Source":
        if self.mask is None:
            return self
        mask = self.mask.written_out(1, self.states.shape[1], self.states.device)
        return Source(states=self.states, mask=mask)


class Block(nn.Module):
    """Attention, then (in a decoder with a source) cross-attention, then feed-forward.

    Each adds to the residual stream: from a normed copy (pre), or followed by a norm of the sum (post).
    Taps: `residual_pre`, `residual_mid` (after attention), `residual_cross`, `residual_post`, and what each
    sub-layer writes: `attention_write`, `cross_write`, `feedforward_write`.
    """

    def __init__(
        self, *, attention: Attention, feedforward: FeedForward, norms: list[LayerNorm | RMSNorm],
        norm_position: NormPosition, cross: Attention | None = None, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        """`norms`: for attention, for cross-attention if there is one, for feed-forward."""
        super().__init__()
        self.norm_position = norm_position
        self.attention_norm, self.attention = norms[0], attention
        if cross is not None:
            self.cross_norm, self.cross = norms[1], cross
            self.residual_cross, self.cross_write = Tap(), Tap()
        else:
            self.cross = None
        self.feedforward_norm, self.feedforward = norms[-1], feedforward
        self.dropout = nn.Dropout(dropout)
        self.residual_pre, self.residual_mid, self.residual_post = Tap(), Tap(), Tap()
        self.attention_write, self.feedforward_write = Tap(), Tap()

    def forward(
        self,
        x: Residual,
        *,
        mask: Mask | None = None,
        relation: Relation | None = None,
        cache: tuple[LayerCache, SourceCache] | None = None,
        source: Source | None = None,
    ) -> Residual:
        if (self.cross is None) != (source is None):
            has, given = ("no" if part is None else "a" for part in (self.cross, source))
            raise ConfigError(f"a block with {has} cross-attention was given {given} source")
        own, of_source = cache if cache is not None else (None, None)
        x, read = self._before(self.attention_norm, self.residual_pre(x))
        write = self.attention(read, mask=mask, relation=relation, cache=own)
        del read  # with a name it would be held longer than it is needed, as would what is written
        x = self.residual_mid(self._add(self.attention_norm, x, self.attention_write(write)))
        del write
        if self.cross is not None and source is not None:
            x, read = self._before(self.cross_norm, x)
            write = self.cross(read, source=source.states, mask=source.mask, cache=of_source)
            del read
            x = self.residual_cross(self._add(self.cross_norm, x, self.cross_write(write)))
            del write
        x, read = self._before(self.feedforward_norm, x)
        write = self.feedforward(read)
        del read
        return self.residual_post(self._add(self.feedforward_norm, x, self.feedforward_write(write)))

    def _before(self, norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """The stream, and what a sub-layer reads of it."""
        if self.norm_position is NormPosition.POST:
            return x, x
        is_ours = trains_compiled(x) and x.dtype is torch.bfloat16 and not is_looked_at(norm)
        if is_ours and isinstance(norm, LayerNorm | RMSNorm):
            return forked(x, norm)
        return x, norm(x)

    def _add(self, norm: nn.Module, x: Tensor, write: Tensor) -> Tensor:
        x = x + self.dropout(write)
        return norm(x) if self.norm_position is NormPosition.POST else x


class Blocks(nn.ModuleList):
    """Blocks one on another; mask and positions are worked out once for all of them."""

    def forward(
        self,
        x: Residual,
        *,
        positions: Positions,
        relation: Rotary | ALiBi | RelativeBias | None = None,
        mask: Mask | None = None,
        cache: KVCache | None = None,
        source: Source | None = None,
    ) -> Residual:
        """`positions`: where the tokens of x stand, for `relation` to use."""
        if cache is not None and len(cache.layers) != len(self):
            raise CacheError(f"the cache is for {len(cache.layers)} layers, the model has {len(self)}")
        n_keys = x.shape[1] if cache is None else cache.n_filled
        if mask is not None:
            mask = mask.written_out(x.shape[1], n_keys, x.device)
        related = None
        if relation is not None:
            keys_stand = positions if cache is None else torch.arange(n_keys, device=x.device)[None]
            related = relation(positions, keys_stand, x.dtype)
        source = None if source is None else source.written_out()
        kept = None if cache is None else list(zip(cache.layers, cache.sources, strict=True))
        for i, block in enumerate(self):
            x = block(x, mask=mask, relation=related, cache=None if kept is None else kept[i], source=source)
        return x
