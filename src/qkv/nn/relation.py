"""How positions enter the scores: rotary turns queries and keys, ALiBi and T5 add a bias by distance."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv.errors import ConfigError
from qkv.nn.tables import made_once
from qkv.tensors import KeyPositions, QueryPositions, ScoreBias


@dataclass(frozen=True, kw_only=True)
class Relation:
    """What one pass tells all its layers about positions; computed once, used by each attention."""

    rotation: tuple[Float[Tensor, "#batch 1 position d_head"], Float[Tensor, "#batch 1 position d_head"]] | None = None
    """cos and sin of the new tokens' angles."""
    bias: ScoreBias | None = None

    def rotate(self, x: Float[Tensor, "batch head position d_head"]) -> Float[Tensor, "batch head position d_head"]:
        if self.rotation is None:
            return x
        cos, sin = (part.to(x.dtype) for part in self.rotation)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin


@dataclass(frozen=True, kw_only=True)
class Slowing:
    """Angles divided by `factor`: all of them, or (Llama 3.1) those that turn seldom in the original context."""

    factor: float
    original_context_length: int | None = None
    low: float = 1.0
    high: float = 4.0
    """Turns in the original context: below `low` slowed down in full, above `high` kept, smooth between."""

    def __call__(self, frequencies: Tensor) -> Tensor:
        if self.original_context_length is None:
            return frequencies / self.factor
        turns = self.original_context_length * frequencies / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


class Rotary(nn.Module):
    """Dimension i and i + d_head/2 of a query or key are turned together, by position × base^(−2i/d_head).

    arXiv:2104.09864, in the halves layout of Llama's published weights.
    """

    def __init__(self, d_head: int, *, base: float = 10000.0, slowing: Slowing | None = None) -> None:
        super().__init__()
        if d_head % 2:
            raise ConfigError(f"rotary positions turn pairs: d_head={d_head} must be even")
        self.d_head = d_head
        self.base = base
        self.slowing = slowing

    def forward(
        self,
        query_positions: QueryPositions,
        key_positions: KeyPositions,  # noqa: ARG002
        dtype: torch.dtype = torch.float32,
    ) -> Relation:
        # Worked out anew each pass: a buffer would be rounded with the weights, and a far position times a
        # bfloat16 frequency is the wrong angle.
        exact = torch.promote_types(dtype, torch.float32)
        device = query_positions.device
        exponents = torch.arange(0, self.d_head, 2, dtype=torch.float64, device=device) / self.d_head
        frequencies = self.base**-exponents
        if self.slowing is not None:
            frequencies = self.slowing(frequencies)
        angles = query_positions[:, None, :, None].to(exact) * frequencies.to(exact)
        angles = torch.cat((angles, angles), dim=-1)
        return Relation(rotation=(made_once(angles.cos()), made_once(angles.sin())))


class ALiBi(nn.Module):
    """A penalty that grows with distance, at a slope of each head's own. arXiv:2108.12409."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.slopes = alibi_slopes(n_heads)

    def forward(
        self, query_positions: QueryPositions, key_positions: KeyPositions, dtype: torch.dtype = torch.float32
    ) -> Relation:
        distance = (query_positions[:, None, :, None] - key_positions[:, None, None, :]).abs()
        exact = torch.promote_types(dtype, torch.float32)
        slopes = torch.tensor(self.slopes, dtype=exact, device=distance.device)[:, None, None]
        return Relation(bias=-slopes * distance)


def alibi_slopes(n_heads: int) -> list[float]:
    """2^(−8/n), 2^(−16/n) …; for other than powers of two, every second slope of the next power fills up."""
    power = 2 ** math.floor(math.log2(n_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    between = [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * power, 2)]
    return slopes + between[: n_heads - power]


class RelativeBias(nn.Module):
    """A learned bias a head for each bucket of distances: exact when near, logarithmic when far (arXiv:1910.10683)."""

    def __init__(self, n_heads: int, *, n_buckets: int, max_distance: int, bidirectional: bool) -> None:
        super().__init__()
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self.table = nn.Embedding(n_buckets, n_heads)

    def forward(
        self,
        query_positions: QueryPositions,
        key_positions: KeyPositions,
        dtype: torch.dtype | None = None,  # noqa: ARG002
    ) -> Relation:
        """The bias has the table's own dtype."""
        ahead = key_positions[:, None, :] - query_positions[:, :, None]
        # In order of keys: a GPU's fused kernels refuse a bias whose neighbours do not stand side by side, and torch
        # would step back, unasked, to the n×n weights.
        return Relation(bias=self.table(self.buckets(ahead)).permute(0, 3, 1, 2).contiguous())

    def buckets(self, ahead: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Which bucket a key `ahead` positions after the query falls into."""
        n_buckets = self.table.num_embeddings
        first = torch.zeros_like(ahead)
        if self.bidirectional:
            n_buckets //= 2
            first = (ahead > 0).long() * n_buckets
            distance = ahead.abs()
        else:
            distance = (-ahead).clamp(min=0)
        n_exact = n_buckets // 2
        # The float32 steps and their order decide which side of an edge a distance falls on; they are T5's.
        far = torch.log(distance.float().clamp(min=1) / n_exact) / math.log(self.max_distance / n_exact)
        far = n_exact + (far * (n_buckets - n_exact)).long()
        return first + torch.where(distance < n_exact, distance, far.clamp(max=n_buckets - 1))
