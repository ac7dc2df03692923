"""How a model knows the order of its tokens.

Absolute positions (learned or sinusoidal) are added to the token embeddings. Relative positions (rotary embeddings,
ALiBi, T5's bias) change the attention scores instead and are passed to every attention layer as a `PositionInfo`.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv.choices import SinusoidStyle
from qkv.errors import ConfigError, ContextLengthError
from qkv.tensors import KeyPositions, Positions, QueryPositions, Residual, ScoreBias
from qkv.utils import first_out_of_range


def sinusoidal_encoding(
    positions: Positions,
    d_model: int,
    style: SinusoidStyle = SinusoidStyle.INTERLEAVED,
    *,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "#batch position d_model"]:
    """Compute the sine and cosine of position · 10000^(−2i/d) for each position (arXiv:1706.03762, section 3.5)."""
    if d_model % 2:
        raise ConfigError(f"sinusoidal positions require an even d_model, got d_model={d_model}")
    first = 1 if style is SinusoidStyle.INTERLEAVED_FROM_ONE else 0
    # The angles are computed in float64 because float32 would be too inaccurate for distant positions.
    pairs = torch.arange(first, first + d_model // 2, dtype=torch.float64, device=positions.device)
    angles = positions[..., None] * 10000 ** (-2 * pairs / d_model)
    match style:
        case SinusoidStyle.HALVES:
            vectors = torch.cat((angles.sin(), angles.cos()), dim=-1)
        case SinusoidStyle.INTERLEAVED | SinusoidStyle.INTERLEAVED_FROM_ONE:
            vectors = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)
    return vectors.to(dtype)


class LearnedPositions(nn.Module):
    """Learned position embeddings, added to the token embeddings.

    Position p uses row p + `offset` of the table. BART and RoBERTa tables start with unused rows.
    """

    def __init__(self, context_length: int, d_model: int, *, offset: int = 0) -> None:
        super().__init__()
        self.offset = offset
        self.table = nn.Embedding(context_length + offset, d_model)

    def forward(self, tokens: Residual, positions: Positions) -> Residual:
        n = self.table.num_embeddings - self.offset
        if (outside := first_out_of_range(positions, n)) is not None:
            raise ContextLengthError(f"the input has {outside + 1} tokens, but the position table has only {n} rows")
        return tokens + self.table(positions + self.offset)


class SinusoidalPositions(nn.Module):
    """Fixed sinusoidal position embeddings, added to the token embeddings."""

    def __init__(self, *, style: SinusoidStyle = SinusoidStyle.INTERLEAVED) -> None:
        super().__init__()
        self.style = style

    def forward(self, tokens: Residual, positions: Positions) -> Residual:
        return tokens + sinusoidal_encoding(positions, tokens.shape[-1], self.style, dtype=tokens.dtype)


class ConcatenatedSinusoidalPositions(nn.Module):
    """Sinusoidal embeddings concatenated with the token embeddings and projected back to d_model.

    The projection [token; sinusoid]·W with W of shape 2d×d is more general than adding token embeddings and sinusoids,
    and costs 2d² parameters (lecture E).
    """

    def __init__(self, d_model: int, *, style: SinusoidStyle = SinusoidStyle.INTERLEAVED) -> None:
        super().__init__()
        self.style = style
        self.project = nn.Linear(2 * d_model, d_model, bias=False)

    def forward(self, tokens: Residual, positions: Positions) -> Residual:
        vectors = sinusoidal_encoding(positions, tokens.shape[-1], self.style, dtype=tokens.dtype)
        return self.project(torch.cat((tokens, vectors.expand_as(tokens)), dim=-1))


@dataclass(frozen=True, kw_only=True)
class PositionInfo:
    """Rotary angles and score bias for a forward pass, computed once and used by every attention layer."""

    rotation: tuple[Float[Tensor, "#batch 1 position d_head"], Float[Tensor, "#batch 1 position d_head"]] | None = None
    """Cosines and sines of the new tokens' rotary angles."""
    bias: ScoreBias | None = None
    """Bias to add to the attention scores."""

    def rotate(self, x: Float[Tensor, "batch head position d_head"]) -> Float[Tensor, "batch head position d_head"]:
        """Apply the rotary embedding to queries or keys."""
        if self.rotation is None:
            return x
        cos, sin = (part.to(x.dtype) for part in self.rotation)
        # Each pair (first[i], second[i]) is rotated like a point in a plane. The dot product of a rotated query and a
        # rotated key depends only on the difference of their angles, which is proportional to their distance.
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin


@dataclass(frozen=True, kw_only=True)
class RopeScalingRule:
    """Rule for scaling rotary frequencies to support longer contexts.

    Linear scaling divides all frequencies by `factor`. If `original_context_length` is set, Llama 3.1's rule divides
    only the low frequencies.
    """

    factor: float
    original_context_length: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    """Limits for scaling frequencies, in full rotations per original context.

    Frequencies with fewer rotations than `low_freq_factor` are divided by `factor`, and those with more rotations than
    `high_freq_factor` are unchanged. The scaling is interpolated between the two limits.
    """

    def __call__(self, frequencies: Tensor) -> Tensor:
        if self.original_context_length is None:
            return frequencies / self.factor
        rotations = self.original_context_length * frequencies / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        unscaled = ((rotations - low) / (high - low)).clamp(0, 1)
        return frequencies * (unscaled + (1 - unscaled) / self.factor)


class RotaryEmbedding(nn.Module):
    """Rotary position embeddings (arXiv:2104.09864).

    Dimensions i and i + d_head/2 of a query or key are rotated by position · theta^(−2i/d_head). Llama's published
    weights use the same layout.
    """

    def __init__(self, d_head: int, *, theta: float = 10000.0, scaling: RopeScalingRule | None = None) -> None:
        super().__init__()
        if d_head % 2:
            raise ConfigError(f"rotary positions require an even d_head, got d_head={d_head}")
        self.d_head, self.theta, self.scaling = d_head, theta, scaling

    def forward(
        self,
        query_positions: QueryPositions,
        key_positions: KeyPositions,  # noqa: ARG002
        dtype: torch.dtype = torch.float32,
    ) -> PositionInfo:
        # The frequencies are recomputed in every pass instead of stored in a buffer. A buffer would be cast together
        # with the weights, and multiplying a bfloat16 frequency by a large position results in a wrong angle.
        precise_dtype = torch.promote_types(dtype, torch.float32)
        device = query_positions.device
        exponents = torch.arange(0, self.d_head, 2, dtype=torch.float64, device=device) / self.d_head
        frequencies = self.theta**-exponents
        if self.scaling is not None:
            frequencies = self.scaling(frequencies)
        angles = query_positions[:, None, :, None].to(precise_dtype) * frequencies.to(precise_dtype)
        angles = torch.cat((angles, angles), dim=-1)
        return PositionInfo(rotation=(angles.cos(), angles.sin()))


class ALiBi(nn.Module):
    """Attention with linear biases, a penalty that grows with distance at one slope per head (arXiv:2108.12409)."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.slopes = alibi_slopes(n_heads)

    def forward(
        self, query_positions: QueryPositions, key_positions: KeyPositions, dtype: torch.dtype = torch.float32
    ) -> PositionInfo:
        # The biases need no parameters, and they also exist for distances that are longer than any in training.
        distance = (query_positions[:, None, :, None] - key_positions[:, None, None, :]).abs()
        precise_dtype = torch.promote_types(dtype, torch.float32)
        slopes = torch.tensor(self.slopes, dtype=precise_dtype, device=distance.device)[:, None, None]
        return PositionInfo(bias=-slopes * distance)


def alibi_slopes(n_heads: int) -> list[float]:
    """Return the ALiBi slope for each head, which is 2^(−8/n), 2^(−16/n), … if the number of heads n is a power of two.

    For other numbers of heads, the remaining slopes are every second slope of the next power of two.
    """
    power = 2 ** math.floor(math.log2(n_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    between = [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * power, 2)]
    return slopes + between[: n_heads - power]


class RelativeBias(nn.Module):
    """T5's relative position bias, which learns a bias per head for each bucket of distances (arXiv:1910.10683).

    Each small distance has its own bucket. Larger distances share buckets of logarithmically growing size.
    """

    def __init__(self, n_heads: int, *, n_buckets: int, max_distance: int, bidirectional: bool) -> None:
        super().__init__()
        self.max_distance, self.bidirectional = max_distance, bidirectional
        self.table = nn.Embedding(n_buckets, n_heads)

    def forward(
        self,
        query_positions: QueryPositions,
        key_positions: KeyPositions,
        dtype: torch.dtype | None = None,  # noqa: ARG002
    ) -> PositionInfo:
        """Compute the bias, whose dtype is that of the embedding table."""
        offsets = key_positions[:, None, :] - query_positions[:, :, None]
        # The bias must be contiguous along the keys. Fused GPU kernels reject other layouts, and PyTorch would silently
        # fall back to an implementation that stores the n×n weights.
        return PositionInfo(bias=self.table(self.bucket_indices(offsets)).permute(0, 3, 1, 2).contiguous())

    def bucket_indices(self, offsets: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Return the bucket index for each offset. An offset is the number of positions from the query to the key."""
        n_buckets = self.table.num_embeddings
        first = torch.zeros_like(offsets)
        if self.bidirectional:
            n_buckets //= 2
            first = (offsets > 0).long() * n_buckets
            distance = offsets.abs()
        else:
            distance = (-offsets).clamp(min=0)
        n_exact = n_buckets // 2
        # The float32 operations must match T5's, including their order, because rounding decides the bucket of a
        # distance that lies on the edge between two buckets.
        log_position = torch.log(distance.float().clamp(min=1) / n_exact) / math.log(self.max_distance / n_exact)
        log_bucket = n_exact + (log_position * (n_buckets - n_exact)).long()
        del log_position  # freed before the next n×n tensor is allocated
        return first + torch.where(distance < n_exact, distance, log_bucket.clamp(max=n_buckets - 1))
