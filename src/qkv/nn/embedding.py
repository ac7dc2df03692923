"""Ids to vectors at the bottom of a model, vectors to logits at its top."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.errors import ConfigError, InputError, ShapeError
from qkv.nn.int8 import Int8Linear
from qkv.nn.norm import LayerNorm, RMSNorm
from qkv.nn.patches import PatchEmbedding
from qkv.nn.positions import ConcatenatedPositions, LearnedPositions, SinusoidalPositions
from qkv.nn.tap import Tap
from qkv.tensors import Ids, Logits, Patches, Positions, Residual


class TokenEmbedding(nn.Module):
    """One vector a token: the same as one-hot × table, by look-up."""

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model).normal_())

    def forward(self, ids: Ids) -> Residual:
        check_ids(ids, self.weight.shape[0])
        return F.embedding(ids, self.weight)


def check_ids(ids: Tensor, vocab_size: int) -> None:
    """Refuse what is no batch of sequences of ids, empty sequences, and ids outside the vocabulary.

    Values are looked at on the CPU alone: elsewhere a look would wait for the device, and inside a compiled
    graph it would break the graph. What feeds a GPU checks its ids before they leave the CPU.
    """
    if ids.ndim != 2:
        raise ShapeError(f"ids have {ids.ndim} axes, shape {tuple(ids.shape)}; they need 2, (batch, position)")
    if ids.dtype not in (torch.int64, torch.int32):
        raise InputError(f"ids are {ids.dtype}, they must be torch.int64 or torch.int32")
    if ids.shape[1] == 0:
        raise InputError("the sequence is empty: 0 ids, there must be at least 1")
    if ids.shape[0] == 0:
        raise InputError("the batch is empty: 0 sequences, there must be at least 1")
    outside = _outside(ids, vocab_size)
    if outside is not None:
        raise InputError(f"id {outside} is outside the vocabulary of {vocab_size} (0 … {vocab_size - 1})")


def _outside(ids: Tensor, n: int) -> int | None:
    """One of the ids that is not among 0 … n − 1, where it may be looked at."""
    if ids.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    low, high = (int(end) for end in ids.aminmax())
    if low < 0:
        return low
    return high if high >= n else None


class InputEmbedding(nn.Module):
    """Token (· scale) + position + segment, then norm and dropout where the model has them.

    Taps: `tokens`, the bare token vectors; `sum`, what the first block reads.
    """

    def __init__(
        self,
        tokens: TokenEmbedding | PatchEmbedding,
        *,
        position: LearnedPositions | SinusoidalPositions | ConcatenatedPositions | None,
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
            x = x + self._segments(ids, segments)
        elif segments is not None:
            raise ConfigError("segments were given, but this embedding has none (n_segments is not set)")
        if self.position is not None:
            x = self.position(x, positions)
        return self.sum(_as_products_run(self.dropout(x if self.norm is None else self.norm(x))))

    def _segments(self, ids: Tensor, segments: Tensor | None) -> Tensor:
        if segments is None:
            segments = torch.zeros_like(ids)
        if segments.shape != ids.shape:
            raise ShapeError(f"segments have shape {tuple(segments.shape)}, ids {tuple(ids.shape)}")
        assert self.segment is not None
        n_segments = self.segment.weight.shape[0]
        outside = _outside(segments, n_segments)
        if outside is not None:
            raise InputError(f"segment {outside} is outside the model's {n_segments} segments (0 … {n_segments - 1})")
        return self.segment(segments)


def _as_products_run(x: Residual) -> Residual:
    """In what is compiled for a GPU, the stream has the precision of autocast's products; norms stay in float32.

    A GPU would take twice as long to read and write it in float32.
    """
    is_compiled = x.is_cuda and torch.compiler.is_compiling() and torch.is_autocast_enabled("cuda")
    return x.to(torch.get_autocast_dtype("cuda")) if is_compiled else x


class Unembedding(nn.Module):
    """One logit a token of the vocabulary: x·Wᵀ (+ b), W the token table itself where it is tied.

    Lecture E writes xW_E; W_E is V×d, so the product needs the transpose.
    """

    def __init__(
        self, vocab_size: int, d_model: int, *, tied_to: TokenEmbedding | None = None, bias: bool = False,
        scale: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.scale = scale
        self.weight = (
            nn.Parameter(torch.empty(vocab_size, d_model).normal_()) if tied_to is None else tied_to.weight
        )
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if bias else None
        self.int8: Int8Linear | None = None
        """In the weights' place, where the model computes so."""
        self.logits = Tap()

    def forward(self, x: Residual) -> Logits:
        x = x * self.scale if self.scale != 1.0 else x
        return self.logits(F.linear(x, self.weight, self.bias) if self.int8 is None else self.int8(x))
