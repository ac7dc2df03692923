"""Token embedding, input embedding with positions and segments, and unembedding to logits."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.accel.int8 import Int8Linear
from qkv.errors import ConfigError, InputError, ShapeError
from qkv.nn.norm import LayerNorm, RMSNorm
from qkv.nn.patches import PatchProjection
from qkv.nn.positions import ConcatenatedSinusoidalPositions, LearnedPositions, SinusoidalPositions
from qkv.nn.tap import Tap
from qkv.tensors import Ids, Logits, Patches, Positions, Residual


class TokenEmbedding(nn.Module):
    """Embedding table with one vector per token."""

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model).normal_())

    def forward(self, ids: Ids) -> Residual:
        check_ids_shape_dtype_range(ids, self.weight.shape[0])
        return F.embedding(ids, self.weight)


def check_ids_shape_dtype_range(ids: Tensor, vocab_size: int) -> None:
    """Raise an error unless `ids` is a non-empty integer batch of shape (batch, position) within the vocabulary.

    Values are checked only on the CPU. On a GPU, the check would synchronize with the device, and in compiled code, it
    would break the graph. Callers that use a GPU check the ids before copying them to the device.
    """
    if ids.ndim != 2:
        raise ShapeError(f"ids must have 2 axes (batch, position), got {ids.ndim} axes with shape {tuple(ids.shape)}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise InputError(f"ids must have dtype torch.int64 or torch.int32, got {ids.dtype}")
    if ids.shape[1] == 0:
        raise InputError("a sequence must contain at least 1 id, got 0 ids")
    if ids.shape[0] == 0:
        raise InputError("a batch must contain at least 1 sequence, got 0 sequences")
    outside = _find_id_outside_if_checkable(ids, vocab_size)
    if outside is not None:
        raise InputError(f"id {outside} is out of range for a vocabulary of {vocab_size} tokens (0 … {vocab_size - 1})")


def _find_id_outside_if_checkable(ids: Tensor, n: int) -> int | None:
    """Return an id outside 0 … n − 1, or `None` if all ids are inside or their values cannot be checked."""
    if ids.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    low, high = (int(end) for end in ids.aminmax())
    if low < 0:
        return low
    return high if high >= n else None


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
        norm: LayerNorm | RMSNorm | None = None,
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
            x = x + self._embed_segments(ids, segments)
        elif segments is not None:
            raise ConfigError("segments were passed, but the model has no segment embeddings (n_segments is not set)")
        if self.position is not None:
            x = self.position(x, positions)
        return self.sum(_cast_to_autocast_if_compiled(self.dropout(x if self.norm is None else self.norm(x))))

    def _embed_segments(self, ids: Tensor, segments: Tensor | None) -> Tensor:
        if segments is None:
            segments = torch.zeros_like(ids)
        if segments.shape != ids.shape:
            raise ShapeError(f"segments have shape {tuple(segments.shape)}, but ids have shape {tuple(ids.shape)}")
        assert self.segment is not None
        n_segments = self.segment.weight.shape[0]
        outside = _find_id_outside_if_checkable(segments, n_segments)
        if outside is not None:
            raise InputError(
                f"segment {outside} is out of range for a model with {n_segments} segments (0 … {n_segments - 1})"
            )
        return self.segment(segments)


def _cast_to_autocast_if_compiled(x: Residual) -> Residual:
    """Cast the residual stream to the autocast dtype if the model is compiled for a GPU.

    Norms still use float32. Reading and writing the residual stream in float32 would take twice as long.
    """
    is_compiled = x.is_cuda and torch.compiler.is_compiling() and torch.is_autocast_enabled("cuda")
    return x.to(torch.get_autocast_dtype("cuda")) if is_compiled else x


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
        self.int8: Int8Linear | None = None
        """Layer that replaces the weights if the model runs in int8, otherwise `None`."""
        self.logits = Tap()

    def forward(self, x: Residual) -> Logits:
        x = x * self.scale if self.scale != 1.0 else x
        return self.logits(F.linear(x, self.weight, self.bias) if self.int8 is None else self.int8(x))
