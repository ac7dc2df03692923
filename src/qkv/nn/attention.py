"""Attention with weights of its own: many heads, over its own input or over a source."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.choices import HeadLayout, Kernel
from qkv.errors import ConfigError, ShapeError
from qkv.nn.cache import LayerCache, SourceCache
from qkv.nn.gradients import projected, trains_compiled
from qkv.nn.lookup import Lookup, attend_fused, weights_of
from qkv.nn.mask import Mask
from qkv.nn.relation import Relation
from qkv.nn.tap import Tap, is_looked_at
from qkv.tensors import HeadResults, Residual

TOKENS_FOR_ONE_PRODUCT = 1024
"""From so many on, on a GPU: below, copying three matrices into one costs as much as it saves."""


@dataclass(frozen=True, kw_only=True)
class Heads:
    """How many heads, how wide, and how their results become one vector."""

    n_heads: int
    n_kv_heads: int
    d_head: int
    d_value: int
    layout: HeadLayout = HeadLayout.SPLIT

    def __post_init__(self) -> None:
        for name in ("n_heads", "n_kv_heads", "d_head", "d_value"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(f"n_heads={self.n_heads} must be a multiple of n_kv_heads={self.n_kv_heads}")

    @classmethod
    def split(cls, d_model: int, n_heads: int) -> "Heads":
        """The usual ones: n_heads pieces of d_model / n_heads."""
        if n_heads < 1 or d_model % n_heads:
            raise ConfigError(f"d_model={d_model} must be a multiple of n_heads={n_heads}")
        width = d_model // n_heads
        return cls(n_heads=n_heads, n_kv_heads=n_heads, d_head=width, d_value=width)

    @property
    def d_result(self) -> int:
        """Width of the heads' results together, before the output projection."""
        return self.n_heads * self.d_value if self.layout is HeadLayout.SPLIT else self.d_value


class Attention(nn.Module):
    """Multi-head attention: over its own input (self), or over a source (cross).

    Taps: `queries`, `keys` and `values` as they meet (after rotary positions), `lookup` (all of these with the
    mask), `scores`, `weights`, and `heads`, each head's result before the output projection. Watching any of
    them leaves the fused kernel on, save `scores` and `weights`, which only the plain road has; at these two and
    at `lookup`, rows that share a source are one row.
    """

    def __init__(
        self, d_model: int, heads: Heads, *, bias: bool = True, output_projection: bool = True,
        scale_scores: bool = True, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        if not output_projection and heads.d_result != d_model:
            raise ConfigError(f"without output_projection the heads' width {heads.d_result} must be d_model={d_model}")
        self.d_model = d_model
        self.shape = heads
        self.scale = heads.d_head**-0.5 if scale_scores else 1.0
        self.has_bias, self.dropout = bias, dropout
        self.kernel = Kernel.FUSED
        self.query = nn.Linear(d_model, heads.n_heads * heads.d_head, bias=bias)
        self.key = nn.Linear(d_model, heads.n_kv_heads * heads.d_head, bias=bias)
        self.value = nn.Linear(d_model, heads.n_kv_heads * heads.d_value, bias=bias)
        self.output = nn.Linear(heads.d_result, d_model, bias=bias) if output_projection else nn.Identity()
        self.queries, self.keys, self.values = Tap(), Tap(), Tap()
        self.lookup, self.scores, self.weights, self.heads = Tap(), Tap(), Tap(), Tap()

    def forward(
        self,
        x: Residual,
        *,
        source: Float[Tensor, "source_batch key d_model"] | None = None,
        mask: Mask | None = None,
        relation: Relation | None = None,
        cache: LayerCache | SourceCache | None = None,
    ) -> Residual:
        """`source`: what to look at, where it is not x itself. A source batch may serve several rows of x each."""
        self._check(x, source)
        query, *key_and_value = self._at_once(x) if source is None and self._pays_at_once(x) else (self.query(x),)
        queries = self._heads_of(query, self.shape.n_heads)
        if relation is not None:
            queries = relation.rotate(queries)
        keys, values = self._keys_and_values(x if source is None else source, key_and_value, relation, cache)
        n_shared = queries.shape[0] // keys.shape[0]
        lookup = Lookup(
            queries=_fold(self.queries(queries), n_shared),
            keys=self.keys(keys),
            values=self.values(values),
            scale=self.scale,
            mask=mask,
            bias=None if relation is None else relation.bias,
            query_positions=None if cache is None else cache.query_positions,
            n_shared=n_shared,
        )
        heads = self.heads(lookup.of_each_text(self._mix(self.lookup(lookup))))
        return self.output(self._join(heads))

    def _pays_at_once(self, x: Tensor) -> bool:
        """On a GPU, where the weights' copy is small beside the product.

        Not where another layer stands for one of the three, or a hook waits for what it gives.
        """
        if not x.is_cuda or x.shape[0] * x.shape[1] < TOKENS_FOR_ONE_PRODUCT:
            return False
        return all(type(part) is nn.Linear and not is_looked_at(part) for part in (self.query, self.key, self.value))

    def _at_once(self, x: Tensor) -> list[Tensor]:
        """Query, key and value by one product: three small ones leave part of a GPU idle."""
        parts = (self.query, self.key, self.value)
        weight, widths = torch.cat([part.weight for part in parts]), [part.out_features for part in parts]
        bias = torch.cat([part.bias for part in parts]) if self.has_bias else None
        if bias is not None and trains_compiled(x):
            return list(projected(x, weight, bias, widths))
        return list(F.linear(x, weight, bias).split(widths, dim=-1))

    def _keys_and_values(
        self,
        looked_at: Tensor,
        made: list[Tensor],
        relation: Relation | None,
        cache: LayerCache | SourceCache | None,
    ) -> tuple[Tensor, Tensor]:
        """`made`: key and value of what is looked at, where they were made with the query."""

        def project() -> tuple[Tensor, Tensor]:
            key, value = made or (self.key(looked_at), self.value(looked_at))
            keys = self._heads_of(key, self.shape.n_kv_heads)
            values = self._heads_of(value, self.shape.n_kv_heads)
            return (keys if relation is None else relation.rotate(keys)), values

        match cache:
            case None:
                return project()
            case SourceCache():
                return cache.fetch(project)
            case LayerCache():
                return cache.append(*project())

    def _mix(self, lookup: Lookup) -> HeadResults:
        wants_weights = any(tap.is_changed or tap.is_watched for tap in (self.scores, self.weights))
        dropout = self.dropout if self.training else 0.0
        if self.kernel is Kernel.FUSED and not wants_weights:
            return attend_fused(lookup, dropout=dropout)
        weights = self.weights(weights_of(self.scores(lookup.scores())))
        return lookup.mix(F.dropout(weights, dropout))

    def _heads_of(self, projected: Tensor, n_heads: int) -> Tensor:
        batch, n, _ = projected.shape
        return projected.view(batch, n, n_heads, -1).transpose(1, 2)

    def _join(self, heads: HeadResults) -> Tensor:
        match self.shape.layout:
            case HeadLayout.SPLIT:
                return heads.transpose(1, 2).flatten(2)
            case HeadLayout.POOLED:
                return heads.sum(1)
            case HeadLayout.POOLED_MEAN:
                return heads.mean(1)

    def _check(self, x: Tensor, source: Tensor | None) -> None:
        for name, given in (("x", x), ("source", source)):
            if given is None:
                continue
            if given.shape[-1] != self.d_model:
                raise ShapeError(f"attention of d_model={self.d_model} was given {name} of width {given.shape[-1]}")
            if given.shape[1] == 0:
                raise ShapeError(f"attention was given {name} of 0 positions; there must be at least 1")
        if source is not None and x.shape[0] % source.shape[0]:
            raise ShapeError(f"{x.shape[0]} rows of x cannot share {source.shape[0]} sources evenly")


def _fold(queries: Tensor, n_shared: int) -> Tensor:
    """Rows that share a source become further queries of that source: nothing of the source is copied."""
    if n_shared == 1:
        return queries
    rows, n_heads, n, width = queries.shape
    grouped = queries.view(rows // n_shared, n_shared, n_heads, n, width).transpose(1, 2)
    return grouped.reshape(rows // n_shared, n_heads, n_shared * n, width)


@contextmanager
def using(model: nn.Module, kernel: Kernel) -> Iterator[None]:
    """Every attention of the model takes that road inside the `with`."""
    before = [(part, part.kernel) for part in model.modules() if isinstance(part, Attention)]
    for part, _ in before:
        part.kernel = kernel
    try:
        yield
    finally:
        for part, old in before:
            part.kernel = old
