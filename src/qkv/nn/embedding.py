"""Embeddings of tokens, image patches, positions and segments, and the unembedding that computes the logits."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.errors import ConfigError, InputError, ShapeError
from qkv.nn.norm import Norm
from qkv.nn.positions import ConcatenatedSinusoidalPositions, LearnedPositions, SinusoidalPositions
from qkv.nn.tap import Tap
from qkv.tensors import Ids, Logits, Patches, Positions, Residual
from qkv.utils import first_out_of_range


class TokenEmbedding(nn.Module):
    """Embedding table with one vector per token."""

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model).normal_())

    def check(self, ids: Tensor) -> None:
        """Raise an error if `ids` is not a non-empty batch of ids of the vocabulary."""
        check_ids_shape_dtype_range(ids, self.weight.shape[0])

    def forward(self, ids: Ids) -> Residual:
        self.check(ids)
        return F.embedding(ids, self.weight)


def check_ids_shape_dtype_range(ids: Tensor, n: int, *, name: str = "id") -> None:
    """Raise an error unless `ids` is a non-empty integer batch of shape (batch, position) with values in 0 … n − 1.

    Values are checked only where that is cheap (see `first_out_of_range`). `name` is the name of an id in errors.
    """
    if ids.ndim != 2 or 0 in ids.shape:
        raise ShapeError(f"{name}s must have shape (batch, position) and not be empty, got shape {tuple(ids.shape)}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise InputError(f"{name}s must have dtype torch.int64 or torch.int32, got {ids.dtype}")
    if (outside := first_out_of_range(ids, n)) is not None:
        raise InputError(f"{name} {outside} is out of range, expected 0 … {n - 1}")


class PatchProjection(nn.Module):
    """Linear embedding of image patches.

    A token embedding is the special case in which every patch is a one-hot vector.
    """

    def __init__(self, d_patch: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_patch, d_model).normal_())

    def check(self, patches: Tensor) -> None:
        """Raise an error if `patches` is not a non-empty float tensor of shape (batch, source, d_patch)."""
        d_patch, shape = self.weight.shape[0], tuple(patches.shape)
        if patches.ndim != 3 or patches.shape[2] != d_patch or patches.numel() == 0:
            raise ShapeError(f"patches must have shape (batch, source, d_patch={d_patch}), not empty, got {shape}")
        if not patches.is_floating_point():
            raise InputError(f"patches must have a floating-point dtype, got {patches.dtype}")

    def forward(self, patches: Patches) -> Residual:
        return patches @ self.weight


class InputEmbedding(nn.Module):
    """Sum of token (· scale), position and segment embeddings, followed by an optional norm and dropout.

    Taps: `tokens`, the (scaled) token embeddings, and `sum`, the input of the first block.
    """

    def __init__(
        self,
        tokens: TokenEmbedding | PatchProjection,
        *,
        position: LearnedPositions | SinusoidalPositions | ConcatenatedSinusoidalPositions | None,
        n_segments: int | None = None,
        scale: float = 1.0,
        norm: Norm | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.token = tokens
        self.position = position
        self.segment = None if n_segments is None else TokenEmbedding(n_segments, tokens.weight.shape[1])
        self.scale = scale
        self.norm = norm
        self.dropout = nn.Dropout(dropout)
        self.tokens, self.sum = Tap(), Tap()

    def forward(self, ids: Ids | Patches, positions: Positions, segments: Ids | None = None) -> Residual:
        x = self.tokens(self.token(ids) * self.scale)
        if self.segment is not None:
            segments = torch.zeros_like(ids) if segments is None else segments
            check_ids_shape_dtype_range(segments, self.segment.weight.shape[0], name="segment")
            if segments.shape != ids.shape:
                raise ShapeError(f"segments have shape {tuple(segments.shape)}, but ids have shape {tuple(ids.shape)}")
            x = x + self.segment(segments)
        elif segments is not None:
            raise ConfigError("segments were passed, but the model has no segment embeddings (n_segments is not set)")
        if self.position is not None:
            x = self.position(x, positions)
        return self.sum(self.dropout(x if self.norm is None else self.norm(x)))


class Unembedding(nn.Module):
    """Linear layer x·Wᵀ (+ b) from the residual stream to logits, optionally tied to the token embedding.

    Lecture E writes xW_E, but W_E has shape V×d, so the product needs its transpose.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        *,
        tied_to: TokenEmbedding | None = None,
        bias: bool = False,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model).normal_()) if tied_to is None else tied_to.weight
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if bias else None
        self.logits = Tap()

    def forward(self, x: Residual) -> Logits:
        x = x * self.scale if self.scale != 1.0 else x
        return self.logits(F.linear(x, self.weight, self.bias))
