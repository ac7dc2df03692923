"""Transformer blocks, which consist of attention and feed-forward sub-layers around the residual stream."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from qkv.choices import Activation, NormPosition
from qkv.errors import ConfigError, KVCacheError
from qkv.nn.attention import Attention
from qkv.nn.cache import KVCache, LayerCache, LayerSourceCache
from qkv.nn.mask import Mask
from qkv.nn.norm import Norm
from qkv.nn.positions import ALiBi, PositionInfo, RelativeBias, RotaryEmbedding
from qkv.nn.tap import Tap
from qkv.tensors import Positions, Residual


@dataclass(frozen=True, kw_only=True)
class Source:
    """Encoder output for a decoder to attend to, with its padding mask."""

    states: Float[Tensor, "batch key d_model"]
    mask: Mask | None = None

    def reorder(self, rows: Int[Tensor, " row"]) -> "Source":
        """Return a source that contains only the given rows, in the given order."""
        attention_mask = None if self.mask is None else self.mask.key_padding_mask
        mask = None if attention_mask is None else Mask(key_padding_mask=attention_mask.index_select(0, rows))
        return Source(states=self.states.index_select(0, rows), mask=mask)

    def materialize_mask(self) -> "Source":
        """Return the source with a dense mask so that the decoder layers do not have to compute it separately."""
        if self.mask is None:
            return self
        mask = self.mask.materialize_if_kernel_needs_it(1, self.states.shape[1], self.states.device)
        return Source(states=self.states, mask=mask)


def activate(x: Tensor, activation: Activation) -> Tensor:
    match activation:
        case Activation.RELU:
            return F.relu(x)
        case Activation.GELU:
            return F.gelu(x)
        case Activation.GELU_TANH:
            return F.gelu(x, approximate="tanh")
        case Activation.SILU:
            return F.silu(x)


class FeedForward(nn.Module):
    """Feed-forward layer with two matrices and an activation, or with three matrices and a gate (arXiv:2002.05202).

    Tap: `hidden`, the input of the down projection.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        activation: Activation = Activation.RELU,
        gated: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.activation, self.has_bias = activation, bias
        self.up_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.gate_proj = nn.Linear(d_model, d_ff, bias=bias) if gated else None
        self.down_proj = nn.Linear(d_ff, d_model, bias=bias)
        self.hidden = Tap()

    def forward(self, x: Residual) -> Residual:
        # The layer processes every position separately. Only attention moves information between positions.
        if self.gate_proj is None:
            hidden = activate(self.up_proj(x), self.activation)
        else:
            # The gate decides for each hidden unit how much of its value passes.
            hidden = activate(self.gate_proj(x), self.activation) * self.up_proj(x)
        return self.down_proj(self.hidden(hidden))


class Block(nn.Module):
    """Transformer block with attention, optional cross-attention and a feed-forward layer.

    The output of each sub-layer is added to the residual stream. With pre-norm, the sub-layer reads a normalized copy
    of the stream. With post-norm, the sum is normalized.

    Taps: the residual stream at `resid_pre`, `resid_mid` (after attention), `resid_cross` (after cross-attention) and
    `resid_post`, and the sub-layer outputs `attention_out`, `cross_attention_out` and `feed_forward_out`.
    """

    def __init__(
        self,
        *,
        attention: Attention,
        feed_forward: FeedForward,
        norms: list[Norm],
        norm_position: NormPosition,
        cross_attention: Attention | None = None,
        dropout: float = 0.0,
    ) -> None:
        """Create a block. `norms` contains one norm per sub-layer, in the order in which the sub-layers run."""
        super().__init__()
        self.norm_position = norm_position
        self.attention_norm, self.attention = norms[0], attention
        if cross_attention is not None:
            self.cross_attention_norm, self.cross_attention = norms[1], cross_attention
            self.resid_cross, self.cross_attention_out = Tap(), Tap()
        else:
            self.cross_attention = None
        self.feed_forward_norm, self.feed_forward = norms[-1], feed_forward
        self.dropout = nn.Dropout(dropout)
        self.resid_pre, self.resid_mid, self.resid_post = Tap(), Tap(), Tap()
        self.attention_out, self.feed_forward_out = Tap(), Tap()

    def forward(
        self,
        x: Residual,
        *,
        mask: Mask | None = None,
        position_info: PositionInfo | None = None,
        cache: tuple[LayerCache, LayerSourceCache] | None = None,
        source: Source | None = None,
    ) -> Residual:
        if (self.cross_attention is None) != (source is None):
            raise ConfigError("a block with cross-attention requires a source, and one without it accepts none")
        self_cache, source_cache = cache if cache is not None else (None, None)
        attend = partial(self.attention, mask=mask, position_info=position_info, cache=self_cache)
        x = self.resid_pre(x)
        x = self.resid_mid(self.add_sublayer(x, self.attention_norm, attend, self.attention_out))
        if self.cross_attention is not None and source is not None:
            attend = partial(self.cross_attention, source=source.states, mask=source.mask, cache=source_cache)
            x = self.resid_cross(self.add_sublayer(x, self.cross_attention_norm, attend, self.cross_attention_out))
        return self.resid_post(self.add_sublayer(x, self.feed_forward_norm, self.feed_forward, self.feed_forward_out))

    def add_sublayer(self, x: Residual, norm: nn.Module, sublayer: Callable[[Tensor], Tensor], tap: Tap) -> Residual:
        """Add the output of a sub-layer to the residual stream, with pre-norm or post-norm."""
        # With pre-norm, the stream is a plain sum from the embedding to the last block, so gradients reach all blocks
        # directly and deep models train without a long warm-up. With post-norm, every norm rescales the stream.
        if self.norm_position is NormPosition.PRE:
            return x + self.dropout(tap(sublayer(norm(x))))
        return norm(x + self.dropout(tap(sublayer(x))))


class Blocks(nn.ModuleList):
    """Stack of blocks that share one dense mask and one set of rotary angles or position biases."""

    activation_checkpointing = False
    """Whether the backward pass recomputes the activations of each block, so that only its input has to be stored."""

    def forward(
        self,
        x: Residual,
        *,
        positions: Positions,
        relative_positions: RotaryEmbedding | ALiBi | RelativeBias | None = None,
        mask: Mask | None = None,
        cache: KVCache | None = None,
        source: Source | None = None,
    ) -> Residual:
        """Run all blocks on `x`. Rotary angles or position biases are computed from the position ids in `positions`."""
        if cache is not None and len(cache.layers) != len(self):
            raise KVCacheError(f"the cache has {len(cache.layers)} layers, but the model has {len(self)}")
        n_keys = x.shape[1] if cache is None else cache.n_filled
        if mask is not None:
            mask = mask.materialize_if_kernel_needs_it(x.shape[1], n_keys, x.device)
        position_info = None
        if relative_positions is not None:
            # Slot j of a cache contains the token at position j, so the cached keys have positions 0 … n_keys − 1.
            key_positions = positions if cache is None else torch.arange(n_keys, device=x.device)[None]
            position_info = relative_positions(positions, key_positions, x.dtype)
        source = None if source is None else source.materialize_mask()
        # All layers use the same mask and positions, but each one has its own cached keys and values.
        layer_caches = [None] * len(self) if cache is None else list(zip(cache.layers, cache.sources, strict=True))
        for block, layer_cache in zip(self, layer_caches, strict=True):
            run = partial(block, mask=mask, position_info=position_info, cache=layer_cache, source=source)
            recomputes = self.activation_checkpointing and torch.is_grad_enabled()
            x = checkpoint(run, x, use_reentrant=False) if recomputes else run(x)
        return x
